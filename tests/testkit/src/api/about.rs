//! What the server says about itself: its version, what it serves, and what the caller may do.

use axum::http::Uri;
use axum::response::{IntoResponse as _, Json, Response};
use serde_json::{Value, json};

use super::{Shared, store};
use crate::lock;

/// Where a client asks whether it may do something.
const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// The answer, if this is such a question. A review counts as one of `selfsubjectaccessreviews`; everything that is not
/// forbidden is allowed.
pub(crate) fn answer(shared: &Shared, uri: &Uri, body: &[u8]) -> Option<Response> {
    let page = match uri.path() {
        "/version" => json!({
            "major": "1", "minor": "37", "gitVersion": "v1.37.2", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "", "goVersion": "", "compiler": "gc", "platform": "linux/amd64",
        }),
        ACCESS_REVIEWS => review(shared, body),
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

fn review(shared: &Shared, body: &[u8]) -> Value {
    let mut review: Value = serde_json::from_slice(body).unwrap_or_default();
    let asked = &review["spec"]["resourceAttributes"];
    let text = |key: &str| asked[key].as_str().unwrap_or_default();
    let resource = match text("subresource") {
        "" => text("resource").to_owned(),
        subresource => format!("{}/{subresource}", text("resource")),
    };
    let rule = (text("verb").to_owned(), resource);
    let allowed = !lock(&shared.switches).forbidden.contains(&rule);
    review["status"] = json!({"allowed": allowed});
    review
}
