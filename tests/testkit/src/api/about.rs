//! What the server says about itself: its version, and what it serves.

use axum::http::Uri;
use axum::response::{IntoResponse as _, Json, Response};
use serde_json::{Value, json};

use super::store;

/// The newest Kubernetes that the API server is like.
pub(crate) const MINOR: u32 = 37;

/// The answer of a server of this minor version, if this is such a question.
pub(crate) fn answer(uri: &Uri, minor: u32) -> Option<Response> {
    let page = match uri.path() {
        "/version" => json!({
            "major": "1", "minor": minor.to_string(), "gitVersion": format!("v1.{minor}.2"), "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "", "goVersion": "", "compiler": "gc", "platform": "linux/amd64",
        }),
        path => resources(
            path.strip_prefix("/apis/")
                .or_else(|| path.strip_prefix("/api/"))?,
        )?,
    };
    Some(Json(page).into_response())
}

/// The kinds of an API version, if there are some.
fn resources(api_version: &str) -> Option<Value> {
    let kinds = store::of_version(api_version);
    if kinds.is_empty() {
        return None;
    }
    let kind = |it: &&store::Resource| {
        json!({
            "name": it.plural, "singularName": "", "kind": it.kind, "verbs": ["get", "list"],
            "namespaced": it.scope == store::Scope::Namespaced,
        })
    };
    let resources: Vec<Value> = kinds.iter().map(kind).collect();
    Some(json!({"kind": "APIResourceList", "groupVersion": api_version, "resources": resources}))
}
