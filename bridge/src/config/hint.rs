//! What somebody may have meant who wrote a key or a word that does not exist.

/// More changed letters than this make another word.
const DISTANCE_LIMIT: usize = 2;

/// The candidate that was most likely meant by a key path.
///
/// In this order: the same but for case and punctuation; a slip in the last part; the right key in a wrong place.
pub(super) fn meant<'a>(path: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let same = |candidate: &&&str| plain(candidate) == plain(path);
    if let Some(candidate) = candidates.iter().find(same) {
        return Some(candidate);
    }
    let (parent, last) = split(path);
    let slip = candidates
        .iter()
        .filter(|candidate| split(candidate).0 == parent)
        .map(|candidate| {
            (
                distance(&plain(split(candidate).1), &plain(last)),
                candidate,
            )
        })
        .filter(|(distance, _)| *distance <= DISTANCE_LIMIT && *distance * 2 < last.len())
        .min_by_key(|(distance, _)| *distance);
    if let Some((_, candidate)) = slip {
        return Some(candidate);
    }
    let misplaced = |candidate: &&&str| plain(split(candidate).1) == plain(last);
    candidates.iter().find(misplaced).copied()
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

fn plain(text: &str) -> String {
    let letters = text.chars().filter(|letter| letter.is_alphanumeric());
    letters.flat_map(char::to_lowercase).collect()
}

/// How many letters must be put in, left out or exchanged to make one of the other (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (column, same) in other.iter().enumerate() {
            let exchanged = diagonal + usize::from(letter != *same);
            diagonal = row[column + 1];
            row[column + 1] = exchanged.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distance_counts_letters() {
        for (one, other, expected) in [("", "ab", 2), ("legacy", "legcy", 1), ("dra", "dar", 2)] {
            assert_eq!(distance(one, other), expected, "{one} {other}");
        }
    }

    #[test]
    fn a_slip_and_a_wrong_place_are_seen_and_nonsense_is_not() {
        let candidates = ["limits", "limits.legacy", "limits.dra", "offers.weights"];
        let cases = [
            ("limit", Some("limits")),
            ("Limits", Some("limits")),
            ("limits.legcy", Some("limits.legacy")),
            ("limits.DRA", Some("limits.dra")),
            ("legacy", Some("limits.legacy")),
            ("weights", Some("offers.weights")),
            ("limits.weights", Some("offers.weights")),
            ("limits.mig", None),
            ("x", None),
        ];
        for (path, expected) in cases {
            assert_eq!(meant(path, &candidates), expected, "{path}");
        }
    }
}
