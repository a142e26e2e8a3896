//! Every state of some small nodes, and what is found where a rule is broken on purpose. `make model` runs both, built
//! with optimisation: a debug build is ten times as slow.
#![allow(
    clippy::print_stdout,
    reason = "the numbers are what these tests are read for"
)]

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::time::Instant;

use model::{Broken, Effort, Findings, PROMISES, Scope, scope_that_finds, scopes, walk_each};

/// So many steps at the most in one scope, or CI would take too long: larger ones are seen as far from the first state
/// as that goes. `MODEL_STEPS` is another number (`make model-long`), or `whole` for all of them, whatever memory that
/// takes.
const STEPS: NonZeroUsize = NonZeroUsize::new(850_000).unwrap();
/// A broken rule shows in a fraction of this.
const STEPS_TO_FIND: NonZeroUsize = NonZeroUsize::new(500_000).unwrap();
/// So many different states are seen, or the walks have become too small to say much.
const STATES: usize = 1_000_000;

/// The scope that `MODEL_SCOPE` names, or all of them.
fn asked_for() -> Vec<Scope> {
    let mut scopes = scopes();
    if let Ok(name) = std::env::var("MODEL_SCOPE") {
        scopes.retain(|scope| scope.name == name);
        assert!(!scopes.is_empty(), "MODEL_SCOPE={name}: no such scope");
    }
    scopes
}

fn effort() -> Effort {
    match std::env::var("MODEL_STEPS") {
        Err(_) => Effort::Steps(STEPS),
        Ok(asked) if asked == "whole" => Effort::Whole,
        Ok(asked) => {
            let steps = asked.parse();
            Effort::Steps(steps.expect("MODEL_STEPS is a number above 0, or whole"))
        }
    }
}

fn line(name: &str, found: &Findings) -> String {
    format!(
        "{name:28} {:>9} states {:>9} steps, depth {:>2}, {:>4} s{}",
        found.states,
        found.steps,
        found.depth,
        found.took.as_secs(),
        if found.seen_whole { "" } else { ", in part" },
    )
}

#[test]
#[ignore = "walks for a minute, and needs an optimised build: make model"]
fn every_state_of_a_small_node_keeps_the_promises() {
    let began = Instant::now();
    let scopes = asked_for();
    let all = Mutex::new(Vec::new());
    println!();
    walk_each(&scopes, effort(), |scope, found| {
        let mut said = line(scope.name, &found);
        for (promise, way) in &found.breaches {
            said += &format!("\nBROKEN: {promise}\n  {}", way.join("\n  "));
        }
        if !found.missed.is_empty() {
            said += &format!("\nNEVER CAME BY: {}", found.missed.join(", "));
        }
        println!("{said}");
        all.lock().expect("no walk panics").push(found);
    });
    let all = all.into_inner().expect("no walk panics");
    let sum = |of: fn(&Findings) -> usize| all.iter().map(of).sum::<usize>();
    let states = sum(|found| found.states);
    let broken = sum(|found| found.breaches.len());
    println!(
        "PROOF model: {states} states explored in {} scenarios ({} of them whole), {} steps, {PROMISES} promises, \
         {broken} broken, in {} s",
        all.len(),
        sum(|found| usize::from(found.seen_whole)),
        sum(|found| found.steps),
        began.elapsed().as_secs(),
    );
    assert_eq!(all.len(), scopes.len(), "a walk has ended without a word");
    assert_eq!(broken, 0, "the ways there are above");
    assert_eq!(
        sum(|found| found.missed.len()),
        0,
        "what is missed is above"
    );
    if std::env::var_os("MODEL_SCOPE").is_none() {
        assert!(states >= STATES, "only {states} states");
    }
}

#[test]
#[ignore = "walks for some seconds, and needs an optimised build: make model"]
fn every_rule_that_is_broken_on_purpose_is_found() {
    let began = Instant::now();
    let survivors = Mutex::new(Vec::new());
    println!();
    let scopes = Broken::ALL.map(scope_that_finds);
    walk_each(&scopes, Effort::Steps(STEPS_TO_FIND), |scope, found| {
        let name = format!("{:?}", scope.broken().expect("each has one"));
        match found.breaches.iter().min_by_key(|(_, way)| way.len()) {
            Some((promise, way)) => {
                let steps = way.len();
                let way = way.join("\n      ");
                let line = line(&name, &found);
                println!("{line}\n    {promise}, after {steps} steps:\n      {way}");
            }
            None => survivors.lock().expect("no walk panics").push(name),
        }
    });
    let survivors = survivors.into_inner().expect("no walk panics");
    println!(
        "PROOF model: broken rules found {} of {}, in {} s",
        Broken::ALL.len() - survivors.len(),
        Broken::ALL.len(),
        began.elapsed().as_secs(),
    );
    assert!(survivors.is_empty(), "nobody notices {survivors:?}");
}
