//! Eight GPUs, five for counted pods and three for claims.

use std::collections::BTreeSet;

use crate::objects::PodSpec;
use crate::world::{Setup, World};

#[tokio::test]
async fn five_counted_and_three_claim_pods_run_on_eight_gpus_and_the_next_wait_for_their_own_kind()
{
    let Some(world) = World::start(Setup::split(5, 3)).await else {
        return;
    };
    world.create_template("one", 1).await;
    let counted: Vec<String> = (0..5).map(|n| format!("counted-{n}")).collect();
    let claims: Vec<String> = (0..3).map(|n| format!("claim-{n}")).collect();
    for pod in &counted {
        world.create(PodSpec::counted(pod, 1)).await;
    }
    for pod in &claims {
        world
            .create(PodSpec::from_template(pod, "one", &["main"]))
            .await;
    }
    let mut used = BTreeSet::new();
    for pod in counted.iter().chain(&claims) {
        used.extend(world.gpus_of(pod).await);
    }
    assert_eq!(used.len(), 8, "eight pods, eight GPUs: {used:?}");

    world.create(PodSpec::counted("counted-next", 1)).await;
    world
        .create(PodSpec::from_template("claim-next", "one", &["main"]))
        .await;
    world.wait_unschedulable("counted-next").await;
    world.wait_unschedulable("claim-next").await;
    world.delete("counted-0").await;
    world.wait_running("counted-next").await;
    world.wait_unschedulable("claim-next").await;
    world.delete("claim-0").await;
    world.wait_running("claim-next").await;
    assert!(world.record().doubles().is_empty());
    let forbidden = world.forbidden();
    assert!(
        forbidden.is_empty(),
        "the rights in manifests/base/rbac.yaml are all that the daemon needs: {forbidden:?}"
    );
}
