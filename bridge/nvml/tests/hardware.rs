//! A look at the real machine: read-only, and by hand.

use std::time::{Duration, Instant};

use bridge_nvml::{Options, Session};

#[tokio::test]
#[ignore = "needs an NVIDIA GPU"]
async fn the_gpus_of_this_machine_are_listed() {
    let session = Session::spawn(Options {
        library: std::env::var_os("NVML_LIBRARY").map(Into::into),
        ..Options::default()
    })
    .unwrap();
    let started = Instant::now();
    let snapshot = session.snapshot().await.unwrap();
    println!("first snapshot in {:?}: {snapshot:#?}", started.elapsed());
    assert!(!snapshot.gpus.is_empty());

    let started = Instant::now();
    let processes = session.processes().await.unwrap();
    println!("processes in {:?}: {processes:#?}", started.elapsed());
    assert_eq!(processes.len(), snapshot.gpus.len());

    let started = Instant::now();
    let again = session.rescan().await.unwrap();
    println!("rescan in {:?}", started.elapsed());
    assert_eq!(again.gpus, snapshot.gpus);
    session.shutdown().await.unwrap();
}

#[tokio::test]
#[ignore = "needs an NVIDIA GPU"]
async fn the_driver_of_this_machine_lets_us_wait_for_errors_and_lets_go_in_time() {
    let (session, xids) = Session::spawn_listening(Options {
        library: std::env::var_os("NVML_LIBRARY").map(Into::into),
        ..Options::default()
    })
    .unwrap();
    let snapshot = session.snapshot().await.unwrap();
    for gpu in &snapshot.gpus {
        println!("{}: {:?}", gpu.uuid, gpu.recovery);
    }
    for _ in 0..3 {
        let started = Instant::now();
        session.rescan().await.unwrap();
        println!("rescan beside the wait in {:?}", started.elapsed());
        assert!(started.elapsed() < Duration::from_secs(10));
    }
    println!("XIDs meanwhile: {:?}", *xids.borrow());
    session.shutdown().await.unwrap();
}
