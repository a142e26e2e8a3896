//! What the pool knows, as gauges: a function of one moment, made anew for each page.

use bridge_core::{Face, Health, Mode, Offers, Status, UnitState, UnitStatus};

use super::count;
use super::families::{Families, face, mode};

/// Every pair of labels that a unit can be counted under: the words of the status page, with the phase of its hold for
/// a unit that is held.
pub(super) const PLACES: [(&str, &str); 12] = [
    ("FreeLegacy", "legacy"),
    ("FreeDra", "dra"),
    ("FreeRest", "both"),
    ("Moving", "none"),
    ("Granted", "legacy"),
    ("Bound", "legacy"),
    ("Reserved", "dra"),
    ("Prepared", "dra"),
    ("Foreign", "none"),
    ("Lost", "none"),
    ("Faulty", "none"),
    ("Unseen", "none"),
];

/// What a page shows of the pool.
#[derive(Debug)]
pub struct Scene<'a> {
    /// The pool.
    pub status: &'a Status,
    /// What both faces show.
    pub offers: &'a Offers,
    /// Each condition, and whether it is `met`, `limited` or `unmet`.
    pub conditions: Vec<(&'static str, &'static str)>,
}

/// The words for how a condition stands.
const STANDINGS: [&str; 3] = ["met", "limited", "unmet"];

impl Scene<'_> {
    pub(super) fn show(&self, families: &Families) {
        let places: Vec<_> = self.status.units.iter().map(place).collect();
        for (state, on) in PLACES {
            let units = places.iter().filter(|place| **place == (state, on));
            let labels = [("state", state), ("face", on)];
            families.units.get_or_create(&labels).set(len(units));
        }
        let units = self.status.units.iter();
        let allocated = units.filter(|unit| unit.holds.iter().any(|hold| hold.face().is_some()));
        families.allocated.set(len(allocated));
        let units = self.status.units.iter();
        let faulty = units.filter(|unit| unit.fault.is_some());
        families.faulty.set(len(faulty));
        for on in [Face::Legacy, Face::Dra] {
            let offered = self.offered(on);
            families.offers.get_or_create(&face(on)).set(offered);
        }
        families.node_allocatable.set(self.offers.count.into());
        for each in Mode::ALL {
            let in_force = self.status.settings.mode == each;
            families
                .mode
                .get_or_create(&mode(each))
                .set(in_force.into());
        }
        for (name, standing) in &self.conditions {
            for word in STANDINGS {
                let labels = [("condition", *name), ("status", word)];
                let is_so = word == *standing;
                families.conditions.get_or_create(&labels).set(is_so.into());
            }
        }
        families.generation.set(count(self.status.generation));
    }

    fn offered(&self, on: Face) -> i64 {
        match on {
            Face::Legacy => {
                let ids = self.offers.counted.iter();
                len(ids.filter(|offer| offer.free && offer.health == Health::Healthy))
            }
            Face::Dra => {
                let devices = self.offers.claims.iter().flatten();
                len(devices.filter(|offer| offer.taint.is_none() && !offer.held_by_claim))
            }
        }
    }
}

fn len(of: impl Iterator) -> i64 {
    i64::try_from(of.count()).unwrap_or(i64::MAX)
}

/// The pair of [`PLACES`] that a unit is counted under.
fn place(unit: &UnitStatus) -> (&'static str, &'static str) {
    let word = unit.state.as_str();
    match unit.state {
        UnitState::FreeLegacy => (word, "legacy"),
        UnitState::FreeDra => (word, "dra"),
        UnitState::FreeRest => (word, "both"),
        UnitState::Moving | UnitState::Lost | UnitState::Faulty | UnitState::Unseen => {
            (word, "none")
        }
        UnitState::Held => unit.holds.first().map_or((word, "none"), |hold| {
            let face = hold.face().map_or("none", Face::as_str);
            (hold.phase().as_str(), face)
        }),
    }
}
