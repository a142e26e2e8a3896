//! Unix sockets: making them, finding out who calls, calling, and cleaning up after a crash.
//!
//! The kubelet and its plugins talk over sockets in shared folders. This module owns what is the same for all of
//! them: a socket file of mode 0600 that is removed only while it is ours ([`bind`], [`SocketFile`]), the check
//! that only root or our own user calls ([`Incoming`]), a client for a socket path ([`channel`]), and the names of
//! our sockets with the sweep of those that a dead process left behind; and who listens on the sockets of others
//! ([`listener`]). It must not know what is spoken on them.

mod bind;
mod connect;
mod incoming;
mod names;
mod peer;
mod throttle;

pub use bind::{Error, PATH_LIMIT_BYTES, Socket, SocketFile, bind};
pub use connect::{channel, is_answer};
pub use incoming::Incoming;
pub use names::{
    device_plugin_socket_name, is_device_plugin_socket_name, is_registration_socket_name,
    is_socket_name, newest_device_plugin_socket, own_admin_socket, registration_socket_name,
    sweep_admin_sockets, sweep_device_plugin_sockets, sweep_registration_sockets,
};
pub use peer::{Identity, Listener, listener};
pub use throttle::Throttle;
