//! How the units of a node are connected, and which of them go best together.
//!
//! It is data that was read once; a pick asks nobody. Which GPU is better connected decides speed and never who may have
//! what, so all that is not known counts as no connection.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::id::UnitId;

/// Most candidates among which the best set is found by looking at all sets: 12,870 of them, of 8 units, at worst.
const EXACT_CANDIDATES: usize = 16;
/// Sets that are grown one by one where there are more candidates. Each costs a look at every candidate for each unit
/// of the set, so that 256 units cost a million looks at worst.
const GROWN_SETS: usize = 16;

/// The nearest thing in the PCIe tree above two GPUs, the farthest first (`nvmlDeviceGetTopologyCommonAncestor`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ancestor {
    /// They are on different CPUs.
    System,
    /// The same CPU, by different host bridges.
    Node,
    /// A host bridge.
    HostBridge,
    /// Several PCIe switches.
    Switches,
    /// One PCIe switch.
    Switch,
    /// They are on one board.
    Board,
}

/// How two units are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Connection {
    /// By PCIe; `None` where NVML does not say.
    pub ancestor: Option<Ancestor>,
    /// NVLinks from one to the other, or from each to switches that both are on: the smaller number then.
    pub nvlinks: u32,
}

impl Connection {
    /// How good it is: the points that NVIDIA's device plugin gives (go-gpuallocator, `calculateGPUPairScore`), so that
    /// the same sets are good ones here and there.
    #[must_use]
    pub fn score(self) -> u32 {
        let by_pcie = match self.ancestor {
            None => 0,
            Some(Ancestor::System) => 10,
            Some(Ancestor::Node) => 20,
            Some(Ancestor::HostBridge) => 30,
            Some(Ancestor::Switches) => 40,
            Some(Ancestor::Switch) => 50,
            Some(Ancestor::Board) => 60,
        };
        self.nvlinks.saturating_mul(100).saturating_add(by_pcie)
    }
}

/// The connections between the units of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Topology {
    /// In order, each once.
    units: Vec<UnitId>,
    /// Of each unit with all units, one row after the other.
    connections: Vec<Connection>,
}

impl Topology {
    /// Of pairs that were read. A pair that is told twice, once from each side, is as good as the better of the two says:
    /// NVML may fail for one side alone.
    #[must_use]
    pub fn new(pairs: impl IntoIterator<Item = (UnitId, UnitId, Connection)>) -> Self {
        let pairs: Vec<_> = pairs.into_iter().collect();
        let both = pairs.iter().flat_map(|(one, other, _)| [one, other]);
        let units: BTreeSet<&UnitId> = both.collect();
        let size = units.len();
        let mut topology = Self {
            units: units.into_iter().cloned().collect(),
            connections: vec![Connection::default(); size * size],
        };
        for (one, other, told) in &pairs {
            let places = topology.place(one).zip(topology.place(other));
            let Some((one, other)) = places.filter(|(one, other)| one != other) else {
                continue;
            };
            for cell in [one * size + other, other * size + one] {
                let known = &mut topology.connections[cell];
                known.ancestor = known.ancestor.max(told.ancestor);
                known.nvlinks = known.nvlinks.max(told.nvlinks);
            }
        }
        topology
    }

    /// Whether nothing is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// How two units are connected.
    #[must_use]
    pub fn between(&self, one: &UnitId, other: &UnitId) -> Connection {
        self.at(self.place(one), self.place(other))
    }

    fn place(&self, unit: &UnitId) -> Option<usize> {
        self.units.binary_search(unit).ok()
    }

    fn at(&self, one: Option<usize>, other: Option<usize>) -> Connection {
        match (one, other) {
            (Some(one), Some(other)) => self.connections[one * self.units.len() + other],
            (None, _) | (_, None) => Connection::default(),
        }
    }

    /// Which `count` of the candidates go best together, and with the units that are chosen already, as places in the
    /// list of candidates. Candidates without a unit are connected with nothing.
    ///
    /// The best set has the most points between its units; of those with as many, the one that leaves the most points
    /// between the others, so that small requests do not break up what large ones need; of those, the one with the first
    /// candidates of the list.
    pub(crate) fn choose(
        &self,
        count: usize,
        candidates: &[Option<&UnitId>],
        chosen: &[Option<&UnitId>],
    ) -> Vec<usize> {
        if count == 0 || count >= candidates.len() || self.is_empty() {
            return (0..candidates.len().min(count)).collect();
        }
        let board = Board::new(self, candidates, chosen);
        if candidates.len() <= EXACT_CANDIDATES {
            board.best_of_all(count)
        } else {
            board.best_grown(count)
        }
    }
}

/// How good a set is: the points between its units, and the points of its units with all candidates, the fewer the
/// better.
type Worth = (u32, Reverse<u32>);

/// The points between candidates, by their places.
struct Board {
    size: usize,
    /// Row by row.
    points: Vec<u32>,
    /// Of each candidate with those that are chosen already.
    with_chosen: Vec<u32>,
    /// Of each candidate with all candidates.
    with_all: Vec<u32>,
}

impl Board {
    fn new(
        topology: &Topology,
        candidates: &[Option<&UnitId>],
        chosen: &[Option<&UnitId>],
    ) -> Self {
        let place = |unit: &Option<&UnitId>| unit.and_then(|unit| topology.place(unit));
        let candidates: Vec<_> = candidates.iter().map(place).collect();
        let chosen: Vec<_> = chosen.iter().map(place).collect();
        let score = |one: &Option<usize>, other: &Option<usize>| topology.at(*one, *other).score();
        let sum = |one: &Option<usize>| chosen.iter().map(|other| score(one, other)).sum();
        let row = |one| candidates.iter().map(move |other| score(one, other));
        let points: Vec<u32> = candidates.iter().flat_map(row).collect();
        let rows = points.chunks(candidates.len().max(1));
        Self {
            size: candidates.len(),
            with_chosen: candidates.iter().map(sum).collect(),
            with_all: rows.map(|row| row.iter().sum()).collect(),
            points,
        }
    }

    fn row(&self, place: usize) -> &[u32] {
        &self.points[place * self.size..][..self.size]
    }

    /// What a candidate adds to a set.
    fn added(&self, set: &[usize], place: usize) -> u32 {
        let row = self.row(place);
        let within: u32 = set.iter().map(|other| row[*other]).sum();
        self.with_chosen[place] + within
    }

    /// Looks at all sets, those with the first candidates first, so that the first of the best stays.
    fn best_of_all(&self, count: usize) -> Vec<usize> {
        let mut best: Option<(Worth, Vec<usize>)> = None;
        let mut set: Vec<usize> = Vec::with_capacity(count);
        // The worth of the set with so many units.
        let mut worths: Vec<Worth> = vec![(0, Reverse(0))];
        let mut next = 0;
        loop {
            if set.len() == count {
                let worth = worths[count];
                if best.as_ref().is_none_or(|(known, _)| worth > *known) {
                    best = Some((worth, set.clone()));
                }
            }
            let lacks = count - set.len();
            if lacks > 0 && next + lacks <= self.size {
                let (points, Reverse(others)) = worths[set.len()];
                let points = points + self.added(&set, next);
                worths.push((points, Reverse(others + self.with_all[next])));
                set.push(next);
                next += 1;
            } else if let Some(last) = set.pop() {
                worths.pop();
                next = last + 1;
            } else {
                return best.map_or_else(Vec::new, |(_, set)| set);
            }
        }
    }

    /// Grows a set from each of the first candidates, always by the one that adds most.
    fn best_grown(&self, count: usize) -> Vec<usize> {
        let mut best: Option<(Worth, Vec<usize>)> = None;
        for first in 0..GROWN_SETS.min(self.size) {
            let (worth, set) = self.grown(first, count);
            if best.as_ref().is_none_or(|(known, _)| worth > *known) {
                best = Some((worth, set));
            }
        }
        best.map_or_else(Vec::new, |(_, set)| set)
    }

    fn grown(&self, first: usize, count: usize) -> (Worth, Vec<usize>) {
        let mut adds = self.with_chosen.clone();
        let mut left: Vec<usize> = (0..self.size).collect();
        let mut set = Vec::with_capacity(count);
        let mut worth = (0, Reverse(0));
        let mut next = Some(first);
        while let Some(place) = next.filter(|_| set.len() < count) {
            set.push(place);
            left.retain(|other| *other != place);
            worth.0 += adds[place];
            worth.1.0 += self.with_all[place];
            for (adds, points) in adds.iter_mut().zip(self.row(place)) {
                *adds += points;
            }
            next = left.iter().copied().max_by_key(|place| {
                let place = *place;
                (adds[place], Reverse(self.with_all[place]), Reverse(place))
            });
        }
        set.sort_unstable();
        (worth, set)
    }
}
