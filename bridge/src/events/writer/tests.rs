//! What the API server gets, and how often.

use bridge_core::{ClaimUid, PodName, PodUid};
use testkit::ApiServer;

use super::super::Recorder;
use super::super::bucket::BURST;
use super::*;

fn event(note: &str) -> Event {
    Event {
        about: About::Node,
        severity: Severity::Normal,
        reason: "ModeChanged",
        action: "Configure",
        note: note.to_owned(),
    }
}

fn writer(api: &ApiServer) -> Writer {
    let config = kube::Config::new(api.url().parse().expect("a URL"));
    Writer {
        client: Client::try_from(config).unwrap(),
        node: "node-a".to_owned(),
        metrics: Metrics::new(),
        bucket: Bucket::full(Instant::now()),
        written: BTreeMap::new(),
        forbidden: None,
    }
}

#[tokio::test]
async fn an_event_names_its_object_and_stands_in_its_namespace() {
    let api = ApiServer::start().await.unwrap();
    let mut writer = writer(&api);
    let pod = About::Pod {
        pod: PodName {
            namespace: "train".to_owned(),
            name: "llm-0".to_owned(),
        },
        uid: PodUid::new("p-1").unwrap(),
    };
    let claim = About::Claim(bridge_core::ClaimRef {
        uid: ClaimUid::new("c-1").unwrap(),
        namespace: "train".to_owned(),
        name: "llm".to_owned(),
    });
    for about in [About::Node, pod, claim] {
        let event = Event {
            about,
            severity: Severity::Warning,
            ..event("words")
        };
        assert_eq!(
            writer.outcome(event, Instant::now()).await,
            EventOutcome::Written
        );
    }
    let seen: Vec<String> = api
        .events()
        .iter()
        .map(|event| {
            let text = |value: &serde_json::Value| value.as_str().unwrap_or("-").to_owned();
            let object = &event["regarding"];
            [
                &event["metadata"]["namespace"],
                &object["apiVersion"],
                &object["kind"],
                &object["namespace"],
                &object["name"],
                &object["uid"],
                &event["type"],
                &event["reason"],
                &event["action"],
                &event["note"],
                &event["reportingController"],
                &event["reportingInstance"],
            ]
            .map(text)
            .join(" ")
        })
        .collect();
    let rest = "Warning ModeChanged Configure words gpu-bridge.dev/gpu-bridge node-a";
    assert_eq!(
        seen,
        [
            format!("default v1 Node - node-a node-a {rest}"),
            format!("train v1 Pod train llm-0 p-1 {rest}"),
            format!("train resource.k8s.io/v1 ResourceClaim train llm c-1 {rest}"),
        ]
    );
}

#[tokio::test]
async fn the_same_again_is_no_second_event_and_is_counted_in_the_first_after_a_while() {
    let api = ApiServer::start().await.unwrap();
    let mut writer = writer(&api);
    assert_eq!(
        writer.outcome(event("a"), Instant::now()).await,
        EventOutcome::Written
    );
    assert_eq!(
        writer.outcome(event("a"), Instant::now()).await,
        EventOutcome::Repeated
    );
    assert_eq!(
        writer.outcome(event("b"), Instant::now()).await,
        EventOutcome::Written
    );
    assert_eq!(api.events().len(), 2);
    let later = Instant::now() + COUNT_AGAIN;
    assert_eq!(
        writer.outcome(event("a"), later).await,
        EventOutcome::Written
    );
    let events = api.events();
    assert_eq!(events.len(), 2);
    let counted = events.iter().find(|event| event["note"] == "a").unwrap();
    assert_eq!(counted["series"]["count"], 3);
    let much_later = later + SAME_FOR;
    assert_eq!(
        writer.outcome(event("a"), much_later).await,
        EventOutcome::Written
    );
    assert_eq!(api.events().len(), 3, "after a while it is news again");
}

#[tokio::test]
async fn a_flood_of_events_stops_at_the_burst() {
    let api = ApiServer::start().await.unwrap();
    let mut writer = writer(&api);
    for number in 0..BURST {
        let written = writer
            .outcome(event(&number.to_string()), Instant::now())
            .await;
        assert_eq!(written, EventOutcome::Written);
    }
    assert_eq!(
        writer.outcome(event("more"), Instant::now()).await,
        EventOutcome::Dropped
    );
    assert_eq!(api.events().len(), usize::try_from(BURST).unwrap());
}

#[tokio::test]
async fn without_the_right_the_server_is_left_alone() {
    let api = ApiServer::start().await.unwrap();
    api.forbid("create", "events");
    let mut writer = writer(&api);
    for note in ["a", "b", "c"] {
        assert_eq!(
            writer.outcome(event(note), Instant::now()).await,
            EventOutcome::Forbidden
        );
    }
    assert_eq!(api.count("create", "events"), 1);
    api.allow("create", "events");
    let later = Instant::now() + RIGHT_AGAIN;
    assert_eq!(
        writer.outcome(event("d"), later).await,
        EventOutcome::Written
    );
    assert_eq!(
        writer.outcome(event("e"), later).await,
        EventOutcome::Written
    );
}

#[tokio::test]
async fn a_note_that_is_too_long_is_cut_at_the_end_of_a_character() {
    let api = ApiServer::start().await.unwrap();
    let mut writer = writer(&api);
    let note = "ü".repeat(NOTE_LIMIT);
    assert_eq!(
        writer.outcome(event(&note), Instant::now()).await,
        EventOutcome::Written
    );
    let written = api.events().remove(0)["note"].as_str().unwrap().to_owned();
    assert_eq!(written.len(), NOTE_LIMIT);
    assert!(note.starts_with(&written));
}

#[tokio::test]
async fn whoever_records_never_waits() {
    let (recorder, queue) = Recorder::new(Metrics::new());
    for _ in 0..2 * super::super::QUEUE_LIMIT {
        recorder.record(event("a"));
    }
    assert_eq!(queue.len(), super::super::QUEUE_LIMIT);
}
