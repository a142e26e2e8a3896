//! The sentences that pod owners read in events, and the page behind each reason.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

use expect_test::expect;

use super::kit::*;
use crate::{
    AllocateOutcome, Face, Fault, ForeignCause, Former, Hold, HoldKind, HolderKind, Patience,
    PrepareOutcome, Refusal, Rival, Xid,
};

/// One refusal of each kind, and of each form that a kind has.
fn every_refusal() -> Vec<Refusal> {
    let held_by = |holder| Refusal::UnitHeld {
        unit: unit("GPU-3f2a"),
        device: device("gpu-3"),
        holder,
        claim: claim_ref("llm-0"),
    };
    let busy = |pids: &[u32]| Refusal::UnitBusy {
        unit: unit("GPU-3f2a"),
        device: device("gpu-3"),
        claim: claim_ref("llm-0"),
        pids: pids.to_vec(),
    };
    let node_missing = |claim| Refusal::DeviceNodeMissing {
        unit: unit("GPU-3f2a"),
        lack: "/dev/nvidia-uvm is missing".to_owned(),
        claim,
    };
    vec![
        Refusal::UnknownDeviceId {
            id: "GPU-gone".to_owned(),
        },
        Refusal::RepeatedDeviceId { id: id("GPU-3f2a") },
        Refusal::NoFreeUnit {
            id: id("GPU-3f2a"),
            units: 8,
            claims: 3,
            counted: 4,
            unusable: 1,
        },
        Refusal::UnknownDevice {
            claim: claim_ref("llm-0"),
            device: device("gpu-9"),
        },
        held_by(HolderKind::CountedPod),
        held_by(HolderKind::PreparedClaim),
        held_by(HolderKind::AllocatedClaim),
        held_by(HolderKind::Unknown),
        busy(&[]),
        busy(&[4711]),
        busy(&[1, 2, 3, 4, 5, 6, 7]),
        Refusal::UnitLost {
            unit: unit("GPU-3f2a"),
            device: device("gpu-3"),
            claim: claim_ref("llm-0"),
        },
        Refusal::UnitFaulty {
            unit: unit("GPU-3f2a"),
            device: device("gpu-3"),
            claim: claim_ref("llm-0"),
            fault: Fault {
                xids: [48, 79].map(Xid::new).into(),
                since: SystemTime::UNIX_EPOCH,
            },
        },
        node_missing(Some(claim_ref("llm-0"))),
        node_missing(None),
        Refusal::CountedPodsFirst {
            unit: unit("GPU-3f2a"),
            device: device("gpu-3"),
            claim: claim_ref("llm-0"),
        },
        Refusal::WaitingForAdoption,
        Refusal::LedgerUnreadable,
        Refusal::OtherRegistrant {
            rival: Rival {
                face: Face::Legacy,
                place: "/k/device-plugins/nvidia-gpu.sock".to_owned(),
                owner: Some("pod kube-system/plugin-x".to_owned()),
            },
        },
    ]
}

#[test]
fn every_sentence_says_what_failed_and_why_and_what_to_do() {
    let sentences: Vec<String> = every_refusal().iter().map(ToString::to_string).collect();
    expect![[r#"
        UnknownDeviceId: the kubelet asked for device "GPU-gone", which gpu-bridge never listed on this node. Restart the kubelet, so that it reads the list anew; if this stays, look for a second device plugin of nvidia.com/gpu.
        RepeatedDeviceId: the kubelet asked for device GPU-3f2a twice in one call, so the call was refused whole. Delete the pod, so that it is scheduled anew.
        NoFreeUnit: device GPU-3f2a cannot be given to this pod: of 8 GPUs, claims hold 3, counted pods hold 4, and 1 cannot be used. The kubelet does not try this pod again: delete it, so that it is scheduled anew.
        UnknownDevice: claim default/llm-0 is allocated to device gpu-9, which is not in this node's pool. Delete the pod and the claim, so that the scheduler picks a device from the current ResourceSlice.
        UnitHeld: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: it is held by a pod that asked for nvidia.com/gpu by count. The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew.
        UnitHeld: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: it is held by another ResourceClaim, prepared on this node. The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew.
        UnitHeld: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: it is held by another ResourceClaim, allocated to the same device. The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew.
        UnitHeld: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: it is held by something that gpu-bridge does not know. The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew.
        UnitBusy: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: NVML does not say whether a process of a former holder still runs on it. The kubelet tries again by itself; if this stays, look at the driver on the node with nvidia-smi.
        UnitBusy: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: a process of a former or unknown holder runs on it (host PID 4711). The kubelet tries again by itself; if this stays, end that process on the node.
        UnitBusy: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: a process of a former or unknown holder runs on it (host PID 1, 2, 3, 4, 5 and 2 more). The kubelet tries again by itself; if this stays, end that process on the node.
        UnitLost: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: the GPU does not answer NVML any more. Delete the pod and the claim to get another GPU, and have this one looked at.
        UnitFaulty: gpu-3 (GPU-3f2a) cannot be prepared for claim default/llm-0: the driver told of XID 48, 79, so the GPU is offered to nobody. Delete the pod and the claim to get another GPU; what has to be done about this one `gpu-bridge status` says on the node.
        DeviceNodeMissing: GPU-3f2a cannot be given to claim default/llm-0, because no container could use it: /dev/nvidia-uvm is missing. Load the driver's modules on the node, as nvidia-modprobe -c 0 -u does, or correct --dev-root; the kubelet tries again by itself.
        DeviceNodeMissing: GPU-3f2a cannot be given to this pod, because no container could use it: /dev/nvidia-uvm is missing. Load the driver's modules on the node, as nvidia-modprobe -c 0 -u does, or correct --dev-root; the kubelet does not try this pod again: delete it, so that it is scheduled anew.
        CountedPodsFirst: gpu-3 (GPU-3f2a) is not prepared for claim default/llm-0 yet: counted pods that are bound to this node need it first. The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew.
        WaitingForAdoption: the ledger of this node is missing, and what runs here is not known yet, so no GPU is given out. It goes on by itself once pod-resources, the kubelet's checkpoints and the API server have answered; gpu-bridge's /readyz says which it waits for.
        LedgerUnreadable: the ledger of this node cannot be read, so no GPU is given out. The file is kept; gpu-bridge's log and /readyz say what to do.
        OtherRegistrant: another daemon serves nvidia.com/gpu on this node too, at /k/device-plugins/nvidia-gpu.sock, so gpu-bridge offers no GPU. Remove that daemon from the node, or gpu-bridge; once it is gone for 30 s GPUs are offered again."#]].assert_eq(&sentences.join("\n"));
}

#[test]
fn every_reason_has_its_sentence_and_every_sentence_opens_with_its_reason() {
    let refusals = every_refusal();
    for refusal in &refusals {
        let sentence = refusal.to_string();
        assert!(sentence.starts_with(&format!("{}: ", refusal.reason())));
        assert!(sentence.ends_with('.'), "{sentence}");
    }
    let used: BTreeSet<&str> = refusals.iter().map(Refusal::reason).collect();
    assert_eq!(used, BTreeSet::from(Refusal::REASONS));
}

/// A node whose every unit somebody of another tenant has, each in another way, with their processes on them.
fn full_of_another_tenant() -> Daemon {
    let pod = || crate::PodRef {
        name: crate::PodName {
            namespace: "secret-tenant".to_owned(),
            name: "secret-pod".to_owned(),
        },
        uid: Some(pod_uid("secret-uid")),
    };
    let claim = || crate::ClaimRef {
        namespace: "secret-tenant".to_owned(),
        ..claim_ref("secret-claim")
    };
    let lingering = |former| ForeignCause::Lingering { former };
    let kinds = [
        HoldKind::Bound {
            id: id("GPU-0"),
            pod: pod(),
        },
        HoldKind::Reserved { claim: claim() },
        HoldKind::Prepared { claim: claim() },
        HoldKind::Foreign {
            cause: lingering(Former::Counted(Some(pod()))),
        },
        HoldKind::Foreign {
            cause: lingering(Former::Claim(claim())),
        },
        HoldKind::Foreign {
            cause: ForeignCause::UnknownUnitOf { pod: pod() },
        },
    ];
    let count = u32::try_from(kinds.len()).unwrap();
    let mut ledger = Daemon::with_gpus(count, all_legacy()).pool.ledger().clone();
    for (number, kind) in kinds.into_iter().enumerate() {
        let hold = Hold::exclusive(kind, SystemTime::UNIX_EPOCH);
        ledger
            .holds
            .insert(unit(&format!("GPU-{number}")), vec![hold]);
    }
    let prepared = crate::Preparation {
        claim: claim(),
        devices: vec![crate::PreparedDevice {
            requests: vec!["secret-request".to_owned()],
            pool: POOL.to_owned(),
            device: device("gpu-2"),
            unit: unit("GPU-2"),
            access: crate::Access::Owner,
        }],
    };
    ledger.prepared.insert(claim().uid, prepared);
    let mut daemon = Daemon::on_ledger(ledger, all_legacy());
    for number in 0..count {
        daemon.run(&format!("GPU-{number}"), &[(4711, Some("secret-uid"))]);
    }
    daemon
}

#[test]
fn no_refusal_names_another_tenant() {
    let mut refusals = Vec::new();
    for number in 0..6 {
        let mut daemon = full_of_another_tenant();
        let name = format!("gpu-{number}");
        match daemon.prepare("claim-a", &[&name]) {
            PrepareOutcome::Wait(refusal) | PrepareOutcome::Refused(refusal) => {
                refusals.push(refusal);
            }
            PrepareOutcome::Prepared(_) => panic!("{name} is in use"),
        }
        let mut daemon = full_of_another_tenant();
        let wanted = format!("GPU-{number}");
        let listed = listing(&[("secret-pod", &["GPU-0"])]);
        // Some go to a counted pod all the same: what is only reserved yields.
        if let AllocateOutcome::Refused(refusal) =
            daemon.allocate(&[&wanted], Patience::LastCall, &listed)
        {
            refusals.push(refusal);
        }
    }
    let reasons: BTreeSet<&str> = refusals.iter().map(Refusal::reason).collect();
    assert!(reasons.contains("UnitHeld"), "{reasons:?}");
    for refusal in refusals {
        let text = refusal.to_string();
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn only_what_the_daemon_itself_must_mend_is_unavailable() {
    let unavailable: Vec<&str> = every_refusal()
        .iter()
        .filter(|refusal| refusal.is_unavailable())
        .map(Refusal::reason)
        .collect();
    assert_eq!(
        unavailable,
        ["WaitingForAdoption", "LedgerUnreadable", "OtherRegistrant"]
    );
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the page is read by the test, not by the core"
)]
fn every_reason_has_a_page_that_says_what_happened_and_why_and_what_to_do() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../migration-guide/reasons");
    for reason in Refusal::REASONS {
        let page = folder.join(format!("{reason}.md"));
        let text = std::fs::read_to_string(&page)
            .unwrap_or_else(|why| panic!("{} is missing: {why}", page.display()));
        assert!(text.starts_with(&format!("# {reason}\n")), "{reason}");
        for part in ["## What happened", "## Why", "## What to do"] {
            assert!(text.contains(part), "{reason}.md has no `{part}`");
        }
    }
}
