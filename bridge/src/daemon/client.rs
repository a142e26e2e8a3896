//! The client of the API server, and what is told of credentials that can't be used: never what they are.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};

/// A kubeconfig that can't be used. Parsers quote the line that they stumble over, and an exec plugin may have written
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
}

/// By the kubeconfig, or else by the service account of the pod.
pub(super) async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<kube::Client> {
    let Some(path) = kubeconfig else {
        let config = kube::Config::incluster()
            .context("no --kubeconfig was given, and this is no pod with a service account")?;
        return kube::Client::try_from(config).context("the Kubernetes client could not be made");
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
    kube::Client::try_from(config).map_err(|_says_what_it_was_given| {
        anyhow::Error::from(Wrong::Credentials {
            path: path.to_owned(),
        })
    })
}
