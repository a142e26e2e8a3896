//! Accepted connections, of callers that may call.

use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_stream::Stream;

use super::throttle::Throttle;

/// After accept(2) has failed, as it does without free file descriptors, the next try waits this long: an error
/// that lasts must not keep a core busy.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// A caller that is refused may come back as often as it likes; the log gets one line per minute.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The uid that may always call: the kubelet's.
const ROOT: u32 = 0;

/// Connections of root and of our own user, for [`tonic`]'s `serve_with_incoming_shutdown`. Others are closed
/// without a word. It never ends and never fails.
#[derive(Debug)]
pub struct Incoming {
    listener: UnixListener,
    path: PathBuf,
    own_uid: u32,
    may_call: fn(uid: u32, own_uid: u32) -> bool,
    pause: Option<Pin<Box<Sleep>>>,
    refused: Throttle,
    failed: Throttle,
}

impl Incoming {
    pub(super) fn new(listener: UnixListener, path: PathBuf) -> Self {
        Self {
            listener,
            path,
            own_uid: geteuid().as_raw(),
            may_call,
            pause: None,
            refused: Throttle::new(LOG_INTERVAL),
            failed: Throttle::new(LOG_INTERVAL),
        }
    }

    /// Who may call: the kubelet runs as root, tools of the admin as root or as the daemon's user.
    fn admits(&self, stream: &UnixStream) -> bool {
        let uid = match stream.peer_cred() {
            Ok(peer) => peer.uid(),
            Err(error) => {
                if let Some(withheld) = self.refused.pass() {
                    tracing::warn!(%error, socket = %self.path.display(), withheld, "refused a caller that can't be told");
                }
                return false;
            }
        };
        let admitted = (self.may_call)(uid, self.own_uid);
        if !admitted && let Some(withheld) = self.refused.pass() {
            tracing::warn!(uid, socket = %self.path.display(), withheld, "refused a caller that is not root");
        }
        admitted
    }
}

fn may_call(uid: u32, own_uid: u32) -> bool {
    uid == ROOT || uid == own_uid
}

impl Stream for Incoming {
    type Item = std::io::Result<UnixStream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(context)) {
                Ok((stream, _)) if self.admits(&stream) => return Poll::Ready(Some(Ok(stream))),
                Ok(_) => {}
                Err(error) => {
                    if let Some(withheld) = self.failed.pass() {
                        tracing::warn!(%error, socket = %self.path.display(), withheld, "could not accept a connection");
                    }
                    self.pause = Some(Box::pin(sleep_until(Instant::now() + PAUSE_AFTER_ERROR)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;

    #[test]
    fn only_root_and_our_own_user_may_call() {
        assert!(may_call(0, 1000));
        assert!(may_call(1000, 1000));
        assert!(!may_call(1001, 1000));
        assert!(!may_call(1001, 0));
    }

    #[tokio::test]
    async fn a_caller_of_our_own_user_is_accepted() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.sock");
        let (mut incoming, _file) = crate::uds::bind(&path).unwrap().into_parts();
        let _client = UnixStream::connect(&path).await.unwrap();
        let accepted = incoming.next().await.expect("a connection").unwrap();
        assert_eq!(accepted.peer_cred().unwrap().uid(), geteuid().as_raw());
    }

    #[tokio::test]
    async fn a_caller_that_may_not_call_is_closed_without_a_word() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.sock");
        let (mut incoming, _file) = crate::uds::bind(&path).unwrap().into_parts();
        incoming.may_call = |_, _| false;
        let mut client = UnixStream::connect(&path).await.unwrap();
        let mut byte = [0];
        tokio::select! {
            _ = incoming.next() => panic!("a caller got through that may not call"),
            read = tokio::io::AsyncReadExt::read(&mut client, &mut byte) => assert_eq!(read.unwrap(), 0),
        }
    }
}
