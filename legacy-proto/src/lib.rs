//! The kubelet APIs of the counted ("legacy") face: device plugin v1beta1, pod-resources v1, and the
//! node-local Pods API v1alpha1 with a reader's subset of the Pod it carries.
//!
//! This crate owns the wire types and the constants of these protocols, as upstream defines them, and
//! nothing else: it knows no rule of the bridge. The Rust under `src/generated` comes from the `.proto`
//! files under `proto/` (their source and version are in `proto/README.md`) and is committed, so that
//! it can be read and so that no build needs `protoc`; `tests/bootstrap.rs` makes it anew and compares.

pub mod deviceplugin;
pub mod pod_subset;
pub mod podresources;
pub mod pods;
