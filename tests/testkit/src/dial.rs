//! Clients on unix sockets, dialled as the kubelet's grpc-go dials them.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

/// A lazy client with `:authority: localhost`: what the kubelet sends to device plugins and to DRA services,
/// and what a plugin sends to the kubelet.
#[must_use]
pub fn localhost(socket: &Path) -> Channel {
    lazy(Endpoint::from_static("http://localhost"), socket)
}

/// A lazy client with the percent-encoded path of the socket as `:authority`: what the kubelet sends to a
/// registration socket, since it dials there without saying an authority.
///
/// # Errors
///
/// When that is no authority for Rust's `http` crate. A server made with it would refuse the real kubelet
/// as well, with PROTOCOL_ERROR; an `@` in the file name of the socket helps.
pub fn as_kubelet_registers(socket: &Path) -> Result<Channel, String> {
    let authority = go_authority(&socket.to_string_lossy());
    let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(|error| {
        format!(
            "the kubelet would dial {} with :authority {authority}, which Rust's http crate refuses \
             ({error}): name the socket with an @, as in gpu.nvidia.com@reg.sock",
            socket.display()
        )
    })?;
    Ok(lazy(endpoint, socket))
}

fn lazy(endpoint: Endpoint, socket: &Path) -> Channel {
    let socket = PathBuf::from(socket);
    endpoint.connect_with_connector_lazy(service_fn(move |_| {
        let socket = socket.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
    }))
}

/// What grpc-go makes of a dial target for `:authority`: `encodeAuthority` in its `clientconn.go`.
fn go_authority(target: &str) -> String {
    let mut authority = String::new();
    for byte in target.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&byte) {
            authority.push(char::from(byte));
        } else {
            write!(authority, "%{byte:02X}").expect("a String takes all text");
        }
    }
    authority
}

/// The text that Go shows for a gRPC error.
pub(crate) fn go_error(status: &tonic::Status) -> String {
    let code = status.code();
    // The two names in which Rust and Go differ.
    let code = if code == tonic::Code::Ok {
        "OK".to_owned()
    } else if code == tonic::Code::Cancelled {
        "Canceled".to_owned()
    } else {
        format!("{code:?}")
    };
    format!("rpc error: code = {code} desc = {}", status.message())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_is_encoded_as_grpc_go_does() {
        assert_eq!(
            go_authority("/var/lib/a b/gpu.nvidia.com@reg.sock"),
            "%2Fvar%2Flib%2Fa%20b%2Fgpu.nvidia.com@reg.sock"
        );
    }

    #[tokio::test]
    async fn a_socket_without_an_at_sign_can_not_be_dialled() {
        let refused = as_kubelet_registers(Path::new("/run/gpu-reg.sock"));
        let text = refused.expect_err("an authority that is refused");
        assert!(text.contains("%2Frun%2Fgpu-reg.sock"), "{text}");
        assert!(text.contains("name the socket with an @"), "{text}");
        as_kubelet_registers(Path::new("/run/gpu@reg.sock"))
            .expect("an authority that is accepted");
    }
}
