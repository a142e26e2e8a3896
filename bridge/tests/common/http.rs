//! One question over HTTP, without a client: pages of the daemon are small, and each connection is used once.

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Asks for `what`, a method and a path; status code and body of the answer, `None` if there is none.
pub(crate) async fn ask(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    what: &str,
    body: &str,
) -> Option<(u16, String)> {
    let (code, answer) = exchange(stream, what, "", body).await?;
    let body = answer.split_once("\r\n\r\n")?.1.to_owned();
    Some((code, body))
}

/// The same with more headers, each with its line end; status code and whole answer.
pub(crate) async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    what: &str,
    headers: &str,
    body: &str,
) -> Option<(u16, String)> {
    let length = body.len();
    let request = format!(
        "{what} HTTP/1.1\r\nHost: local\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let code = answer.split_whitespace().nth(1)?.parse().ok()?;
    Some((code, answer))
}
