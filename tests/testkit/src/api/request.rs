//! What a request asks for: path and query of the Kubernetes API.

use std::collections::BTreeMap;

use axum::http::{Method, Uri};
use serde_json::Value;

use super::store::{self, Failure, Resource, Scope, failure};

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) resource: &'static Resource,
    /// `None`: over all namespaces, or a cluster-wide kind.
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) subresource: Option<String>,
    pub(crate) query: BTreeMap<String, String>,
}

impl Target {
    pub(crate) fn parse(uri: &Uri) -> Result<Self, Failure> {
        let path: Vec<&str> = uri.path().split('/').filter(|it| !it.is_empty()).collect();
        let unknown = || {
            let message = format!("the test API server does not serve {}", uri.path());
            failure(404, "NotFound", message)
        };
        let (api_version, rest) = match path.as_slice() {
            ["api", version, rest @ ..] => ((*version).to_owned(), rest),
            ["apis", group, version, rest @ ..] => (format!("{group}/{version}"), rest),
            _ => return Err(unknown()),
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] => (Some((*namespace).to_owned()), rest),
            _ => (None, rest),
        };
        let (plural, rest) = rest.split_first().ok_or_else(unknown)?;
        let resource = store::find(&api_version, plural).ok_or_else(unknown)?;
        let mut rest = rest.iter().map(|it| (*it).to_owned());
        let target = Self {
            resource,
            namespace,
            name: rest.next(),
            subresource: rest.next(),
            query: query(uri.query().unwrap_or_default()),
        };
        let scoped = target.namespace.is_some() || target.name.is_none();
        if rest.next().is_some() || (resource.scope == Scope::Namespaced && !scoped) {
            return Err(unknown());
        }
        Ok(target)
    }

    /// The verb of RBAC.
    pub(crate) fn verb(&self, method: &Method) -> &'static str {
        match (method.as_str(), &self.name) {
            ("GET", _) if self.is_watch() => "watch",
            ("GET", Some(_)) => "get",
            ("GET", None) => "list",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", Some(_)) => "delete",
            ("DELETE", None) => "deletecollection",
            _ => "unknown",
        }
    }

    pub(crate) fn is_watch(&self) -> bool {
        self.flag("watch")
    }

    /// With what a DELETE has in its body, where others have it in the query.
    pub(crate) fn with_delete_options(mut self, body: &[u8]) -> Self {
        let options: Value = serde_json::from_slice(body).unwrap_or_default();
        if let Some(how) = options["dryRun"][0].as_str() {
            self.query.insert("dryRun".to_owned(), how.to_owned());
        }
        self
    }

    /// Whether nothing may be stored, whatever the answer is.
    pub(crate) fn is_dry_run(&self) -> bool {
        self.query.contains_key("dryRun")
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.query
            .get(name)
            .is_some_and(|it| it == "true" || it == "1")
    }

    /// The resource of RBAC, with its subresource.
    pub(crate) fn rbac_resource(&self) -> String {
        match &self.subresource {
            None => self.resource.plural.to_owned(),
            Some(sub) => format!("{}/{sub}", self.resource.plural),
        }
    }

    pub(crate) fn key(&self) -> store::Key {
        (
            self.namespace.clone().unwrap_or_default(),
            self.name.clone().unwrap_or_default(),
        )
    }
}

fn query(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, value)| (decode(name), decode(value)))
        .collect()
}

/// `application/x-www-form-urlencoded`.
fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits: String = rest.by_ref().take(2).map(char::from).collect();
                u8::from_str_radix(&digits, 16).unwrap_or(b'?')
            }
            plain => plain,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
