//! A look at the real machine: read-only, and by hand.

use bridge_nvml::{Options, Session};

#[tokio::test]
#[ignore = "needs an NVIDIA GPU"]
async fn the_gpus_of_this_machine_are_listed() {
    let session = Session::spawn(Options {
        library: std::env::var_os("NVML_LIBRARY").map(Into::into),
        ..Options::default()
    })
    .unwrap();
    let started = std::time::Instant::now();
    let snapshot = session.snapshot().await.unwrap();
    println!("first snapshot in {:?}: {snapshot:#?}", started.elapsed());
    assert!(!snapshot.gpus.is_empty());

    let started = std::time::Instant::now();
    let processes = session.processes().await.unwrap();
    println!("processes in {:?}: {processes:#?}", started.elapsed());
    assert_eq!(processes.len(), snapshot.gpus.len());

    let started = std::time::Instant::now();
    let again = session.rescan().await.unwrap();
    println!("rescan in {:?}", started.elapsed());
    assert_eq!(again.gpus, snapshot.gpus);
    session.shutdown().await.unwrap();
}
