//! `/`: the table of `gpu-bridge status` for people who would rather look. Three files, compiled in: no build step, and
//! nothing of the internet.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// Path of the page.
pub const PAGE: &str = "/";
/// Path of its script.
pub const SCRIPT: &str = "/page.js";
/// Path of its style.
pub const STYLE: &str = "/page.css";

/// The page loads its own script and style and asks its own daemon, and nobody else; nobody frames it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(super) async fn page() -> Response {
    file("text/html; charset=utf-8", include_str!("web/index.html"))
}

pub(super) async fn script() -> Response {
    file(
        "text/javascript; charset=utf-8",
        include_str!("web/page.js"),
    )
}

pub(super) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("web/page.css"))
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // An update of the daemon brings its own files.
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests;
