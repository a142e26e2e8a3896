//! Which ids `GetPreferredAllocation` prefers on nodes whose wiring is known, and what NVIDIA's plugin would pick there.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::kit::{Daemon, unit};
use crate::{
    Ancestor, Connection, CountedOffer, DeviceId, Health, Offers, Prefer, Settings, Topology,
    UnitId,
};

/// The wiring of real machines, as `nvidia-smi topo -m` prints it; the fake NVML answers by the same files.
const DGX_H100: &str = include_str!("../../../../tests/fake-nvml/scenarios/dgx-h100.yaml");
const DGX_1V: &str = include_str!("../../../../tests/fake-nvml/scenarios/dgx-1v.yaml");
const DGX_2: &str = include_str!("../../../../tests/fake-nvml/scenarios/dgx-2.yaml");
const PCIE_PAIRS: &str = include_str!("../../../../tests/fake-nvml/scenarios/pcie-pairs.yaml");

/// Connections by the numbers of two GPUs.
type Wiring = Vec<Vec<Connection>>;

/// The rows of a scenario's `topology`.
fn recorded(scenario: &str) -> Wiring {
    let rows = scenario.lines().filter_map(|line| {
        let row = line.trim().strip_prefix("- \"")?.strip_suffix('"')?;
        Some(row.split_whitespace().map(cell).collect())
    });
    rows.collect()
}

/// `PIX`, `NV2/SYS`, or `X` for a GPU with itself.
fn cell(text: &str) -> Connection {
    let (links, level) = match text.split_once('/') {
        Some((links, level)) => (links.strip_prefix("NV").unwrap().parse().unwrap(), level),
        None => (0, text),
    };
    Connection {
        nvlinks: links,
        ancestor: match level {
            "X" => None,
            "SYS" => Some(Ancestor::System),
            "NODE" => Some(Ancestor::Node),
            "PHB" => Some(Ancestor::HostBridge),
            "PXB" => Some(Ancestor::Switches),
            "PIX" => Some(Ancestor::Switch),
            other => panic!("no level is called {other}"),
        },
    }
}

/// The same with so many links of each GPU to switches, which the rows do not show.
fn switched(wiring: Wiring, nvlinks: u32) -> Wiring {
    let row = |row: Vec<Connection>| {
        let cells = row.into_iter();
        cells.map(|it| Connection { nvlinks, ..it }).collect()
    };
    wiring.into_iter().map(row).collect()
}

fn name(number: usize) -> UnitId {
    unit(&format!("GPU-{number:02}"))
}

fn topology(wiring: &Wiring) -> Topology {
    Topology::new(wiring.iter().enumerate().flat_map(|(one, row)| {
        let others = row.iter().enumerate();
        others.map(move |(other, connection)| (name(one), name(other), *connection))
    }))
}

/// A node of which every unit is free, and on offer to counted pods.
fn offers(wiring: &Wiring) -> Offers {
    let offer = |number| CountedOffer {
        id: DeviceId::of_unit(name(number)),
        unit: name(number),
        health: Health::Healthy,
        numa_node: None,
        free: true,
        leaving: false,
        reserved: false,
    };
    Offers {
        counted: (0..wiring.len()).map(offer).collect(),
        topology: Arc::new(topology(wiring)),
        ..Offers::default()
    }
}

/// The numbers of the units that are preferred, in order.
fn picked(offers: &Offers, available: &[usize], must: &[usize], size: usize) -> Vec<usize> {
    let texts = |numbers: &[usize]| -> Vec<String> {
        numbers.iter().map(|it| name(*it).to_string()).collect()
    };
    let ids = offers.preferred(&texts(available), &texts(must), size);
    let number = |id: &String| id.strip_prefix("GPU-").unwrap().parse().unwrap();
    let mut numbers: Vec<usize> = ids.iter().map(number).collect();
    numbers.sort_unstable();
    numbers
}

fn all(wiring: &Wiring) -> Vec<usize> {
    (0..wiring.len()).collect()
}

/// The points of a set.
fn points(wiring: &Wiring, set: &[usize]) -> u32 {
    let pairs = set.iter().enumerate();
    pairs
        .flat_map(|(place, one)| {
            set[..place]
                .iter()
                .map(|other| wiring[*one][*other].score())
        })
        .sum()
}

/// What NVIDIA's plugin picks (go-gpuallocator, best-effort policy): of all ways to part what is available into sets of
/// the size, the one with the most points in all, and of its sets the one with the most. `None`: nothing.
fn nvidias_pick(
    wiring: &Wiring,
    available: &[usize],
    must: &[usize],
    size: usize,
) -> Option<Vec<usize>> {
    let has_must = |set: &Vec<usize>| set.len() == size && must.iter().all(|it| set.contains(it));
    let parts = if size == 1 {
        // One set alone each: what is left over does not count.
        available.iter().map(|it| vec![vec![*it]]).collect()
    } else {
        partitions(available, size, available.len() % size)
    };
    let total = |parts: &Vec<Vec<usize>>| parts.iter().map(|set| points(wiring, set)).sum::<u32>();
    let mut best: Option<Vec<Vec<usize>>> = None;
    for parts in parts.into_iter().filter(|sets| sets.iter().any(has_must)) {
        if best.as_ref().is_none_or(|best| total(&parts) > total(best)) {
            best = Some(parts);
        }
    }
    let sets = best?.into_iter().filter(has_must);
    sets.reduce(|best, set| {
        if points(wiring, &set) > points(wiring, &best) {
            set
        } else {
            best
        }
    })
}

/// All ways to part the units into sets of a size and, if there are some over, one smaller set of these.
fn partitions(units: &[usize], size: usize, over: usize) -> Vec<Vec<Vec<usize>>> {
    let Some((first, rest)) = units.split_first() else {
        return vec![Vec::new()];
    };
    let mut found = Vec::new();
    let small = (over > 0).then_some((over, 0));
    for (size_here, over_then) in std::iter::once((size, over)).chain(small) {
        for mut set in subsets(rest, size_here - 1) {
            let is_left = |it: &&usize| !set.contains(it);
            let left: Vec<usize> = rest.iter().filter(is_left).copied().collect();
            set.insert(0, *first);
            for mut parts in partitions(&left, size, over_then) {
                parts.insert(0, set.clone());
                found.push(parts);
            }
        }
    }
    found
}

fn subsets(of: &[usize], size: usize) -> Vec<Vec<usize>> {
    if size == 0 {
        return vec![Vec::new()];
    }
    let Some((first, rest)) = of.split_first() else {
        return Vec::new();
    };
    let with = subsets(rest, size - 1).into_iter().map(|mut set| {
        set.insert(0, *first);
        set
    });
    with.chain(subsets(rest, size)).collect()
}

/// Every set of units that may be available, every size, and no unit or the last one as one that must be in.
fn compare(wiring: &Wiring, theirs: &Wiring) {
    let offers = offers(wiring);
    for bits in 1_u32..1 << wiring.len() {
        let available: Vec<usize> = (0..wiring.len()).filter(|it| bits >> it & 1 == 1).collect();
        for size in 1..=available.len() {
            for must in [&[][..], &available[available.len() - 1..]] {
                let ours = picked(&offers, &available, must, size);
                let nvidias = nvidias_pick(theirs, &available, must, size).unwrap();
                assert!(
                    points(theirs, &ours) >= points(theirs, &nvidias),
                    "of {available:?} with {must:?}: {ours:?} where NVIDIA's plugin has {nvidias:?}"
                );
            }
        }
    }
}

#[test]
fn on_recorded_machines_no_pick_has_fewer_points_than_that_of_nvidias_plugin() {
    let dgx_h100 = recorded(DGX_H100);
    // Its plugin does not count links to switches.
    compare(&switched(dgx_h100.clone(), 18), &dgx_h100);
    for wiring in [recorded(DGX_1V), recorded(PCIE_PAIRS)] {
        compare(&wiring, &wiring);
    }
}

/// NVIDIA's plugin cannot be compared with on all sixteen: it would look at some 10^9 ways to part them. No set at all
/// has more points than ours, so none that it would come to has.
#[test]
fn on_a_recorded_machine_with_sixteen_gpus_no_set_of_any_size_has_more_points_than_the_pick() {
    let by_pcie = recorded(DGX_2);
    let offers = offers(&switched(by_pcie.clone(), 6));
    let sixteen = all(&by_pcie);
    for size in 1..=16 {
        let sets = subsets(&sixteen, size);
        for must in [&[][..], &[5], &[3, 12]] {
            let has_must = |set: &&Vec<usize>| must.iter().all(|it| set.contains(it));
            let allowed = sets.iter().filter(has_must);
            let Some(best) = allowed.map(|set| points(&by_pcie, set)).max() else {
                continue;
            };
            let ours = picked(&offers, &sixteen, must, size);
            assert_eq!(points(&by_pcie, &ours), best, "{ours:?} with {must:?}");
        }
    }
}

#[test]
fn of_what_is_free_of_sixteen_no_pick_has_fewer_points_than_that_of_nvidias_plugin() {
    let by_pcie = recorded(DGX_2);
    let offers = offers(&switched(by_pcie.clone(), 6));
    let left: [&[usize]; 5] = [
        &[0, 1, 2, 3, 4, 5, 6, 7],
        &[0, 2, 4, 6, 8, 10, 12, 14],
        &[1, 2, 3, 7, 8, 9, 14, 15],
        &[0, 3, 4, 5, 10, 11, 13],
        &[6, 7, 9, 12, 15],
    ];
    for available in left {
        for size in 1..=available.len() {
            let ours = picked(&offers, available, &[], size);
            let nvidias = nvidias_pick(&by_pcie, available, &[], size).unwrap();
            assert!(
                points(&by_pcie, &ours) >= points(&by_pcie, &nvidias),
                "of {available:?}: {ours:?} where NVIDIA's plugin has {nvidias:?}"
            );
        }
    }
}

#[test]
fn the_best_connected_units_come_first_and_those_at_the_tail_where_that_is_the_same() {
    let dgx_h100 = offers(&switched(recorded(DGX_H100), 18));
    let dgx_1v = offers(&recorded(DGX_1V));
    let pairs = offers(&recorded(PCIE_PAIRS));
    let dgx_2 = offers(&switched(recorded(DGX_2), 6));
    let sixteen: Vec<usize> = (0..16).collect();
    let eight: Vec<usize> = (0..8).collect();
    let table: [(&Offers, &[usize], &[usize]); 18] = [
        // All are alike but for the CPU that they are on.
        (&dgx_h100, &eight, &[7]),
        (&dgx_h100, &eight, &[6, 7]),
        (&dgx_h100, &eight, &[4, 5, 6, 7]),
        (&dgx_h100, &[0, 1, 2, 3, 7], &[7]),
        (&dgx_h100, &[0, 1, 2, 3, 7], &[2, 3]),
        // Two links and one switch.
        (&dgx_1v, &eight, &[6, 7]),
        (&dgx_1v, &eight, &[4, 5, 6, 7]),
        (&dgx_1v, &[0, 1, 2, 3, 4, 5], &[2, 3]),
        // Two links to the other CPU are better than one link on the same.
        (&dgx_1v, &[0, 1, 4], &[0, 4]),
        (&pairs, &[0, 1, 2, 3], &[3]),
        (&pairs, &[0, 1, 2, 3], &[2, 3]),
        (&pairs, &[0, 1, 2, 3], &[1, 2, 3]),
        // The pair stays whole for a pod that needs one.
        (&pairs, &[0, 2, 3], &[0]),
        (&pairs, &[0, 1, 3], &[0, 1]),
        // One switch, two of them, one CPU.
        (&dgx_2, &sixteen, &[14, 15]),
        (&dgx_2, &sixteen, &[12, 13, 14, 15]),
        (&dgx_2, &sixteen, &[8, 9, 10, 11, 12, 13, 14, 15]),
        (&dgx_2, &[0, 1, 2, 4, 5, 6, 7, 9, 11, 13, 15], &[4, 5, 6, 7]),
    ];
    for (offers, available, expected) in table {
        let ours = picked(offers, available, &[], expected.len());
        assert_eq!(ours, expected, "of {available:?}");
    }
}

#[test]
fn what_must_be_in_brings_its_neighbours() {
    let dgx_1v = offers(&recorded(DGX_1V));
    let eight: Vec<usize> = (0..8).collect();
    for (must, size, expected) in [
        (vec![0], 2, vec![0, 3]),
        (vec![0], 4, vec![0, 1, 2, 3]),
        (vec![1, 5], 2, vec![1, 5]),
        (vec![4], 1, vec![4]),
        // The kubelet never asks for fewer than must be in.
        (vec![1, 2, 3], 2, vec![1, 2]),
    ] {
        assert_eq!(picked(&dgx_1v, &eight, &must, size), expected, "{must:?}");
    }
}

#[test]
fn wiring_decides_among_ids_that_are_alike_and_never_takes_one_that_is_worse() {
    let mut offers = offers(&recorded(PCIE_PAIRS));
    offers.counted[3].leaving = true;
    assert_eq!(picked(&offers, &[0, 1, 2, 3], &[], 2), [0, 1]);
    assert_eq!(picked(&offers, &[0, 2, 3], &[], 2), [0, 2]);
    // The best of those that are worse goes with those that are taken anyway.
    offers.counted[0].reserved = true;
    offers.counted[1].leaving = true;
    assert_eq!(picked(&offers, &[0, 1, 2, 3], &[], 2), [2, 3]);
}

#[test]
fn where_the_tail_is_preferred_wiring_decides_nothing_and_all_else_stays() {
    let mut tail = Offers {
        prefer: Prefer::Tail,
        ..offers(&recorded(DGX_1V))
    };
    let wired = offers(&recorded(DGX_1V));
    let six: Vec<usize> = (0..6).collect();
    assert_eq!(picked(&wired, &six, &[], 2), [2, 3]);
    assert_eq!(picked(&tail, &six, &[], 2), [4, 5]);
    assert_eq!(picked(&wired, &six, &[0], 2), [0, 3]);
    assert_eq!(picked(&tail, &six, &[0], 2), [0, 5]);
    assert_eq!(picked(&tail, &six, &[], 9), six);
    assert_eq!(picked(&tail, &six, &[1, 2, 3], 2), [1, 2]);
    // Free ones first, then those that are about to leave, then what a claim was allocated.
    tail.counted[5].reserved = true;
    tail.counted[4].leaving = true;
    tail.counted[3].free = false;
    assert_eq!(picked(&tail, &six, &[], 2), [1, 2]);
    assert_eq!(picked(&tail, &six, &[], 4), [0, 1, 2, 4]);
    assert_eq!(picked(&tail, &six, &[], 5), [0, 1, 2, 3, 4]);
    assert_eq!(picked(&tail, &six, &[5], 3), [1, 2, 5]);
}

#[test]
fn what_is_preferred_changes_with_the_settings_and_changes_no_other_offer() {
    let mut daemon = Daemon::with_gpus(8, Settings::default());
    let wiring = Arc::new(topology(&recorded(DGX_1V)));
    daemon.act(|t| t.observe_topology(Arc::clone(&wiring)));
    let before = daemon.pool.offers();
    let settings = |prefer| Settings {
        prefer,
        ..Settings::default()
    };
    daemon.act(|t| t.configure(settings(Prefer::Tail)));
    let changed = Offers {
        prefer: Prefer::Tail,
        ..before.clone()
    };
    assert_eq!(daemon.pool.offers(), changed);
    daemon.act(|t| t.configure(settings(Prefer::Wiring)));
    assert_eq!(daemon.pool.offers(), before);
}

#[test]
fn what_was_read_of_the_wiring_is_in_the_offers_and_moves_nobody() {
    let mut daemon = Daemon::with_gpus(4, Settings::default());
    let before = daemon.pool.offers();
    let wiring = Arc::new(topology(&recorded(PCIE_PAIRS)));
    daemon.act(|t| t.observe_topology(Arc::clone(&wiring)));
    let after = daemon.pool.offers();
    assert_eq!(after.topology, wiring);
    assert_eq!(after.counted, before.counted);
    assert_eq!(after.claims, before.claims);
}

#[test]
fn a_connection_that_is_known_from_one_side_is_known() {
    let link = |nvlinks, ancestor| Connection { nvlinks, ancestor };
    let topology = Topology::new([
        (name(0), name(1), link(2, None)),
        (name(1), name(0), link(0, Some(Ancestor::Node))),
        (name(1), name(1), link(9, Some(Ancestor::Board))),
    ]);
    let known = link(2, Some(Ancestor::Node));
    assert_eq!(topology.between(&name(0), &name(1)), known);
    assert_eq!(topology.between(&name(1), &name(0)), known);
    assert_eq!(topology.between(&name(1), &name(1)), link(0, None));
    assert_eq!(topology.between(&name(0), &name(7)), link(0, None));
    assert_eq!(known.score(), 220);
}

/// Symmetric wirings of so many units.
fn wirings(units: std::ops::Range<usize>) -> impl Strategy<Value = Wiring> {
    let level = prop::sample::select(vec![
        None,
        Some(Ancestor::System),
        Some(Ancestor::Node),
        Some(Ancestor::Switches),
        Some(Ancestor::Switch),
    ]);
    let connection =
        (0_u32..3, level).prop_map(|(nvlinks, ancestor)| Connection { nvlinks, ancestor });
    units.prop_flat_map(move |size| {
        let cells = prop::collection::vec(connection.clone(), size * size);
        cells.prop_map(move |cells| {
            let cell = |one: usize, other: usize| match one.cmp(&other) {
                std::cmp::Ordering::Less => cells[one * size + other],
                std::cmp::Ordering::Greater => cells[other * size + one],
                std::cmp::Ordering::Equal => Connection::default(),
            };
            let row = |one| (0..size).map(|other| cell(one, other)).collect();
            (0..size).map(row).collect()
        })
    })
}

/// A wiring, which of its units are available, which of these must be in, and how many are wanted.
fn questions(
    units: std::ops::Range<usize>,
) -> impl Strategy<Value = (Wiring, Vec<usize>, Vec<usize>, usize)> {
    wirings(units).prop_flat_map(|wiring| {
        let size = wiring.len();
        let available = prop::sample::subsequence(all(&wiring), 1..=size);
        available.prop_flat_map(move |available| {
            let wiring = wiring.clone();
            (1..=available.len()).prop_flat_map(move |size| {
                let must = prop::sample::subsequence(available.clone(), 0..=size);
                let (wiring, available) = (wiring.clone(), available.clone());
                must.prop_map(move |must| (wiring.clone(), available.clone(), must, size))
            })
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_pick_has_fewer_points_than_any_other_or_than_that_of_nvidias_plugin(
        (wiring, available, must, size) in questions(1..8),
    ) {
        let ours = picked(&offers(&wiring), &available, &must, size);
        let sets = subsets(&available, size).into_iter();
        let allowed = sets.filter(|set| must.iter().all(|it| set.contains(it)));
        let best = allowed.map(|set| points(&wiring, &set)).max();
        prop_assert_eq!(Some(points(&wiring, &ours)), best);
        if let Some(nvidias) = nvidias_pick(&wiring, &available, &must, size) {
            prop_assert!(points(&wiring, &ours) >= points(&wiring, &nvidias));
        }
    }

    #[test]
    fn a_pick_has_its_size_and_what_must_be_in_and_nothing_that_is_not_available(
        (wiring, available, must, size) in questions(1..40),
    ) {
        let offers = offers(&wiring);
        let ours = picked(&offers, &available, &must, size);
        let set: BTreeSet<&usize> = ours.iter().collect();
        prop_assert_eq!(set.len(), size);
        prop_assert!(must.iter().all(|it| set.contains(it)));
        prop_assert!(ours.iter().all(|it| available.contains(it)));
        prop_assert_eq!(&ours, &picked(&offers, &available, &must, size));
    }

    #[test]
    fn where_all_units_are_alike_the_tail_is_picked(size in 1_usize..40, wanted in 1_usize..40) {
        let alike = Connection { nvlinks: 18, ancestor: Some(Ancestor::Node) };
        let offers = offers(&vec![vec![alike; size]; size]);
        let available: Vec<usize> = (0..size).collect();
        let ours = picked(&offers, &available, &[], wanted);
        let tail = size.saturating_sub(wanted)..size;
        prop_assert_eq!(ours, tail.collect::<Vec<_>>());
    }
}
