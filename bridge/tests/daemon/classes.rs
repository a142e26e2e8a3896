//! Classes that make claims of counted pods (KEP-5004), which come and go while the daemon runs.

use serde_json::json;

use crate::events::{is_told, told};
use crate::live::condition_says;
use crate::world::{NODE, World};

/// The condition, and the reason that it is not fully met.
const CONDITION: &str = "CountsStayCounts";
const MAPPED: &str = "MappedClass";
const NONE: &str = "no DeviceClass has the extendedResourceName nvidia.com/gpu";

impl World {
    /// Makes a class, or exchanges it for one with another resource.
    fn put_class(&self, name: &str, created: &str, resource: &str) {
        let metadata = json!({"name": name, "creationTimestamp": created});
        let spec = json!({"extendedResourceName": resource});
        self.api
            .put("deviceclasses", json!({"metadata": metadata, "spec": spec}));
    }

    async fn says_of_classes(&self, words: &str) {
        condition_says(self, CONDITION, &[words]).await;
    }

    /// How the condition stands on the page of the status.
    async fn class_reason(&self) -> Option<String> {
        let page = self.status().await;
        let mut all = page["conditions"].as_array().unwrap().iter();
        let found = all.find(|it| it["name"] == CONDITION).unwrap();
        found["reason"].as_str().map(str::to_owned)
    }
}

#[tokio::test]
async fn a_class_that_makes_claims_of_counted_pods_is_told_when_it_comes_and_when_it_goes() {
    let mut world = World::configured(2, "mode: both\n").await;
    world.put_class("other", "2026-03-01T00:00:00Z", "example.com/gpu");
    world.says_of_classes(NONE).await;
    assert_eq!(world.class_reason().await, None);

    world.put_class("old", "2026-01-01T00:00:00Z", "nvidia.com/gpu");
    world
        .says_of_classes("DeviceClass old has the extendedResourceName nvidia.com/gpu")
        .await;
    assert_eq!(world.class_reason().await.as_deref(), Some(MAPPED));
    is_told(&world, "Node", NODE, MAPPED).await;

    // Of two the newest counts, whichever was there first.
    world.put_class("new", "2026-02-01T00:00:00Z", "nvidia.com/gpu");
    let both = "DeviceClass new (the newest that has the name, before old)";
    world.says_of_classes(both).await;
    world.api.delete("deviceclasses", "", "new");
    world.says_of_classes("DeviceClass old has").await;
    // One that stays, and takes another name.
    world.put_class("old", "2026-01-01T00:00:00Z", "example.com/gpu");
    world.says_of_classes(NONE).await;
    assert_eq!(world.class_reason().await, None);

    // Where it can do nothing nobody looks, and nothing is told; what has changed meanwhile is seen afterwards.
    for harmless in [
        "mode: both\noffers: {minLegacy: 1}\n",
        "mode: legacy\n",
        "mode: dra\n",
    ] {
        world.configure(harmless);
        world.says_of_classes("no DeviceClass changes").await;
        world.put_class("old", "2026-01-01T00:00:00Z", "nvidia.com/gpu");
        world.configure("mode: both\n");
        world.says_of_classes("DeviceClass old has").await;
        world.api.delete("deviceclasses", "", "old");
        world.says_of_classes(NONE).await;
    }
    let reasons = told(&world);
    assert!(
        reasons.iter().all(|(kind, _, _)| kind == "Node"),
        "{reasons:?}"
    );
}

#[tokio::test]
async fn a_right_to_see_the_classes_that_is_missing_keeps_nobody_from_serving_and_is_found_again() {
    let mut world = World::new(2).await;
    world.api.forbid("list", "deviceclasses");
    world.configure("mode: both\n");
    let world = world.started().await;
    world.says_of_classes("a right is missing").await;
    world.put_class("old", "2026-01-01T00:00:00Z", "nvidia.com/gpu");
    world.api.allow("list", "deviceclasses");
    world.says_of_classes("DeviceClass old has").await;
    world.run_counted("a", 1).await;
    is_told(&world, "Node", NODE, MAPPED).await;
}

#[tokio::test]
async fn of_claims_that_the_scheduler_of_1_34_does_not_make_nobody_is_warned_until_the_upgrade() {
    let mut world = World::new(2).await;
    world.api.call_itself(34);
    world.configure("mode: both\n");
    let world = world.started().await;
    world.put_class("counts", "2026-01-01T00:00:00Z", "nvidia.com/gpu");
    world
        .says_of_classes("by which the scheduler of Kubernetes 1.34 makes no claims")
        .await;
    assert_eq!(world.class_reason().await, None);
    let reasons = told(&world);
    assert!(reasons.iter().all(|it| it.2 != MAPPED), "{reasons:?}");

    // The server is started anew as a newer one, so the watch ends.
    world.api.call_itself(35);
    world.api.restore(world.api.back_up());
    world
        .says_of_classes("the scheduler makes claims of counted pods")
        .await;
    assert_eq!(world.class_reason().await.as_deref(), Some(MAPPED));
    is_told(&world, "Node", NODE, MAPPED).await;
}
