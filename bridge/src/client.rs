//! The client of the API server, for the daemon and for verbs, and what is told of credentials that can't be used: never
//! what they are. For verbs also whole lists and single answers, with an end to each wait; the daemon follows what it
//! reads (`follow`).

use std::fmt::Debug;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::follow::chain;

/// How long the API server may take for one answer to a verb. Lists come in pages: a large cluster has some ten thousand
/// pods.
const PATIENCE: Duration = Duration::from_secs(30);
/// Objects per page.
const PAGE_SIZE: u32 = 500;
/// Pages of one kind that are read: five million objects. A server that never comes to an end is not followed.
const PAGES: usize = 10_000;

/// A kubeconfig that can't be used, or not by this build. Parsers quote the line that they stumble over, and an exec plugin may have written
/// anything before it failed: that may be a token, so neither is told.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    /// It is no kubeconfig.
    #[error(
        "--kubeconfig {} is no kubeconfig{}; compare with `kubectl config view --kubeconfig` of that file",
        path.display(),
        line.map_or_else(String::new, |line| format!(" from line {line} on"))
    )]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where it stops to be one, if that is known; from 1.
        line: Option<u64>,
    },
    /// Its user can't log in.
    #[error(
        "--kubeconfig {} has a user whose credentials can't be used: check its token, keys, certificates, and what its \
         exec plugin says when it is run by hand", path.display()
    )]
    Credentials {
        /// The file.
        path: PathBuf,
    },
    /// The API server speaks HTTPS, and this program does not.
    #[error(
        "the API server is to be asked by HTTPS, and this gpu-bridge was built without it, as `make demo` builds it: use \
         the image, or build it with the feature tls, which `cargo build --release -p gpu-bridge` has"
    )]
    NoTls,
}

/// The API server could not be asked, or did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}: {why}")]
pub struct Error {
    what: String,
    why: String,
}

/// For the daemon: by the kubeconfig, or else by the service account of the pod.
pub(crate) async fn of_daemon(kubeconfig: Option<&Path>) -> anyhow::Result<kube::Client> {
    let Some(path) = kubeconfig else {
        let config = kube::Config::incluster()
            .context("no --kubeconfig was given, and this is no pod with a service account")?;
        return kube::Client::try_from(config).map_err(|error| {
            no_client(&error, || {
                anyhow::anyhow!("the Kubernetes client could not be made: {error}")
            })
        });
    };
    let unusable = |error: KubeconfigError| {
        if let KubeconfigError::Parse(error) = error {
            return anyhow::Error::from(Wrong::Parse {
                path: path.to_owned(),
                line: error.location().map(|location| location.line()),
            });
        }
        let what = format!("--kubeconfig {} can't be used", path.display());
        anyhow::Error::from(error).context(what)
    };
    let file = Kubeconfig::read_from(path).map_err(unusable)?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(unusable)?;
    kube::Client::try_from(config).map_err(|error| {
        no_client(&error, || {
            anyhow::Error::from(Wrong::Credentials {
                path: path.to_owned(),
            })
        })
    })
}

/// What is told when no client could be made. Beside what this build lacks it is `otherwise`: the library's own words
/// may have in them what it was given.
fn no_client(error: &kube::Error, otherwise: impl FnOnce() -> anyhow::Error) -> anyhow::Error {
    if let kube::Error::TlsRequired = error {
        anyhow::Error::from(Wrong::NoTls)
    } else {
        otherwise()
    }
}

/// For a verb, with the credentials of whoever runs it: by the kubeconfig, or else as kubectl finds its own (`KUBECONFIG`,
/// `~/.kube/config`), or else by the service account of a pod.
///
/// # Errors
/// There are no credentials, or they can't be used. What is wrong with kubectl's own file is not told: a parser quotes
/// what it stumbles over, which may be a token.
pub(crate) async fn of_caller(kubeconfig: Option<&Path>) -> Result<kube::Client, Error> {
    let unusable = |why: String| Error {
        what: "the API server can't be asked".to_owned(),
        why,
    };
    if let Some(path) = kubeconfig {
        let client = of_daemon(Some(path)).await;
        return client.map_err(|error| unusable(format!("{error:#}")));
    }
    let Ok(config) = kube::Config::infer().await else {
        return Err(unusable(
            "neither KUBECONFIG nor ~/.kube/config is a kubeconfig that can be used, and this is no pod with a service \
             account; see what `kubectl config view` says, or give --kubeconfig"
                .to_owned(),
        ));
    };
    kube::Client::try_from(config).map_err(|error| {
        let words =
            "the credentials of the kubeconfig can't be used; see what `kubectl get nodes` says";
        unusable(no_client(&error, || anyhow::anyhow!(words)).to_string())
    })
}

/// One answer, in time; `what` is told if there is none.
pub(crate) async fn answer<T>(
    what: impl FnOnce() -> String,
    question: impl Future<Output = kube::Result<T>>,
) -> Result<T, Error> {
    let why = match timeout(PATIENCE, question).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => chain(&error),
        Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
    };
    Err(Error { what: what(), why })
}

/// All objects of a kind that the parameters let through, as far as they are of use.
pub(crate) async fn every<K, T>(
    api: &Api<K>,
    params: ListParams,
    keep: impl Fn(K) -> Option<T>,
) -> Result<Vec<T>, Error>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let plural = K::plural(&());
    let whence = || match api.namespace() {
        Some(namespace) => format!("-n {namespace}"),
        None => "-A".to_owned(),
    };
    let what = || {
        let whence = whence();
        format!("{plural} can't be listed: see `kubectl auth can-i list {plural} {whence}`")
    };
    let mut params = params.limit(PAGE_SIZE);
    let mut kept = Vec::new();
    for _ in 0..PAGES {
        let page = answer(what, api.list(&params)).await?;
        kept.extend(page.items.into_iter().filter_map(&keep));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(kept),
        }
    }
    Err(Error {
        what: format!("{plural} can't be listed"),
        why: format!("the API server has more than {PAGES} pages of them"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_tls_says_so_and_not_that_the_credentials_are_wrong() {
        let told = |error: kube::Error| {
            let credentials = || anyhow::anyhow!("credentials");
            no_client(&error, credentials).to_string()
        };
        let said = told(kube::Error::TlsRequired);
        for words in [
            "built without it",
            "the feature tls",
            "cargo build --release",
        ] {
            assert!(said.contains(words), "{said}");
        }
        let other = kube::Error::ProxyProtocolUnsupported {
            proxy_url: Box::new("ftp://proxy".parse().unwrap()),
        };
        assert_eq!(told(other), "credentials");
    }
}
