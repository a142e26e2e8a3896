//! Where the configuration comes from: one source at a time.

use std::fmt;
use std::path::{Path, PathBuf};

use bridge_core::is_object_name;

/// Key of the configuration in a ConfigMap, and so the name of the file that a volume makes of it.
pub const KEY: &str = "config.yaml";

/// Where the configuration is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A file, which may be in the volume of a ConfigMap. Needs no API server.
    File(PathBuf),
    /// A ConfigMap at the API server: in force as soon as it is changed.
    ConfigMap(MapName),
}

impl Source {
    /// The file, if it is one.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::ConfigMap(_) => None,
        }
    }

    /// What stands in messages where a file has its path.
    #[must_use]
    pub fn origin(&self) -> PathBuf {
        match self {
            Self::File(path) => path.clone(),
            Self::ConfigMap(map) => PathBuf::from(format!("ConfigMap {map}/{KEY}")),
        }
    }
}

/// Namespace and name of a ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapName {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl MapName {
    /// Reads `NAMESPACE/NAME`; `None`: it is not that.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        let is_good = is_object_name(namespace) && !namespace.contains('.') && is_object_name(name);
        is_good.then(|| Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    }
}

impl fmt::Display for MapName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_map_is_named_by_namespace_and_name() {
        let map = MapName::parse("gpu-bridge/nodes.v2").expect("a name");
        assert_eq!(map.to_string(), "gpu-bridge/nodes.v2");
        let origin = Source::ConfigMap(map).origin();
        assert_eq!(
            origin.to_str(),
            Some("ConfigMap gpu-bridge/nodes.v2/config.yaml")
        );
        for wrong in ["", "a", "a/", "/a", "a.b/c", "a/b/c", "A/b", "a/../b"] {
            assert_eq!(MapName::parse(wrong), None, "{wrong}");
        }
    }
}
