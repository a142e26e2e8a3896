//! Which GPUs an admin gives to one kind of pods alone, or to nobody.

use crate::ledger::UnitRecord;
use crate::settings::Face;

/// The faces that may offer a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Faces {
    /// The device plugin may.
    pub legacy: bool,
    /// The DRA plugin may.
    pub dra: bool,
}

impl Faces {
    /// Both may: what holds for a unit that no rule is for.
    pub const BOTH: Self = Self {
        legacy: true,
        dra: true,
    };
    /// None may: the unit is excluded.
    pub const NONE: Self = Self {
        legacy: false,
        dra: false,
    };

    /// Whether a face may.
    #[must_use]
    pub fn allows(self, face: Face) -> bool {
        match face {
            Face::Legacy => self.legacy,
            Face::Dra => self.dra,
        }
    }
}

/// How a rule tells units apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Matcher {
    /// The GPU with this UUID.
    Uuid(String),
    /// The GPU that is called `gpu-N` in the ResourceSlice and in `gpu-bridge status`.
    Index(u32),
    /// The GPU at this place, as sysfs writes it: `0000:65:00.0`.
    PciBusId(String),
    /// Every GPU whose product name is like this, where `*` stands for anything and `?` for one character.
    Product(String),
}

/// One rule: for which units, and who may offer them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceRule {
    /// For which units.
    pub matcher: Matcher,
    /// Who may offer them.
    pub faces: Faces,
}

impl DeviceRule {
    pub(crate) fn is_for(&self, record: &UnitRecord) -> bool {
        let gpu = &record.gpu;
        match &self.matcher {
            Matcher::Uuid(uuid) => gpu.uuid.as_str() == uuid,
            Matcher::Index(number) => record.number == *number,
            Matcher::PciBusId(place) => gpu.pci_bus_id.eq_ignore_ascii_case(place),
            Matcher::Product(pattern) => is_like(&gpu.product_name, pattern),
        }
    }
}

/// Whether a text is like a pattern, letters of either case being the same. Each decision asks it of every unit, so it
/// keeps nothing but two places.
fn is_like(text: &str, pattern: &str) -> bool {
    let same = |one: char, other: char| one.to_lowercase().eq(other.to_lowercase());
    let (mut text, mut pattern) = (text.chars(), pattern.chars());
    // What comes after the last star, and where in the text what that stands for ends.
    let mut star = None;
    loop {
        let here = text.clone();
        match (pattern.next(), text.next()) {
            (None, None) => return true,
            (Some('*'), _) => {
                star = Some((pattern.clone(), here.clone()));
                text = here;
            }
            (Some('?'), Some(_)) => {}
            (Some(wanted), Some(letter)) if same(wanted, letter) => {}
            // The star stands for one character more.
            (Some(_) | None, Some(_) | None) => {
                let Some((after, end)) = &mut star else {
                    return false;
                };
                if end.next().is_none() {
                    return false;
                }
                (pattern, text) = (after.clone(), end.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_has_stars_and_question_marks() {
        let name = "NVIDIA H100 80GB HBM3";
        for (pattern, expected) in [
            ("*", true),
            ("*h100*", true),
            ("NVIDIA H100 80GB HBM3", true),
            ("NVIDIA H?00*", true),
            ("NVIDIA H100", false),
            ("*A100*", false),
            ("?VIDIA*HBM?", true),
            ("**HBM3**", true),
            ("", false),
            ("NVIDIA H100 80GB HBM3?", false),
            ("*0*GB*3", true),
            ("*00*00*", false),
            ("*HBM", false),
        ] {
            assert_eq!(is_like(name, pattern), expected, "{pattern}");
        }
        assert!(is_like("", "*"));
        assert!(!is_like("", "?"));
    }
}
