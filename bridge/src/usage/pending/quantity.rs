//! Quantities of the API (`resource.Quantity`, kubernetes v1.37.2, `apimachinery/pkg/api/resource/quantity.go`), in
//! thousandths, for comparing what pods ask for with what a node has.

/// Suffixes, each with what it stands for in thousandths of one: as a product and a divisor.
const SUFFIXES: [(&str, u128, u128); 16] = [
    ("Ki", 1_000 << 10, 1),
    ("Mi", 1_000 << 20, 1),
    ("Gi", 1_000 << 30, 1),
    ("Ti", 1_000 << 40, 1),
    ("Pi", 1_000 << 50, 1),
    ("Ei", 1_000 << 60, 1),
    ("n", 1, 1_000_000),
    ("u", 1, 1_000),
    ("m", 1, 1),
    ("k", 1_000_000, 1),
    ("M", 1_000_000_000, 1),
    ("G", 1_000_000_000_000, 1),
    ("T", 1_000_000_000_000_000, 1),
    ("P", 1_000_000_000_000_000_000, 1),
    ("E", 1_000_000_000_000_000_000_000, 1),
    ("", 1_000, 1),
];
/// Digits behind the point that are read: below a thousandth of a thousandth nothing is asked for.
const DIGITS: usize = 9;

/// Rounded down; what is larger than any machine is the largest number. `None`: it is no quantity, or negative.
pub(super) fn milli(text: &str) -> Option<u64> {
    let (number, factor, divisor) = match exponent(text) {
        Some((number, factor, divisor)) => (number, factor, divisor),
        None => SUFFIXES.iter().find_map(|(suffix, factor, divisor)| {
            let number = text.strip_suffix(suffix)?;
            number
                .ends_with(|c: char| c.is_ascii_digit() || c == '.')
                .then_some((number, *factor, *divisor))
        })?,
    };
    let number = number.strip_prefix('+').unwrap_or(number);
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && part.is_empty() {
        return None;
    }
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    if !digits(whole) || !digits(part) {
        return None;
    }
    let part = part.get(..DIGITS.min(part.len()))?;
    let scale = 10_u128.pow(u32::try_from(part.len()).ok()?);
    let whole: u128 = if whole.is_empty() {
        0
    } else {
        whole.parse().ok()?
    };
    let part: u128 = if part.is_empty() {
        0
    } else {
        part.parse().ok()?
    };
    let value = whole.saturating_mul(scale).saturating_add(part);
    let milli = value.saturating_mul(factor) / scale / divisor;
    Some(u64::try_from(milli).unwrap_or(u64::MAX))
}

/// `12e6`, `1E-3`: the number before the exponent, and what it stands for.
fn exponent(text: &str) -> Option<(&str, u128, u128)> {
    let at = text.find(['e', 'E'])?;
    let power: i32 = text[at + 1..].parse().ok()?;
    let size = 10_u128.checked_pow(power.unsigned_abs())?;
    let number = &text[..at];
    if power < 0 {
        return Some((number, 1_000, size));
    }
    Some((number, size.checked_mul(1_000)?, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_the_api_writes_them() {
        for (text, want) in [
            ("0", Some(0)),
            ("1", Some(1_000)),
            ("1500m", Some(1_500)),
            ("1.5", Some(1_500)),
            (".5", Some(500)),
            ("2.", Some(2_000)),
            ("+3", Some(3_000)),
            ("1Ki", Some(1_024_000)),
            ("1.5Gi", Some(1_610_612_736_000)),
            ("1k", Some(1_000_000)),
            ("2M", Some(2_000_000_000)),
            ("100n", Some(0)),
            ("2500u", Some(2)),
            ("12e3", Some(12_000_000)),
            ("5E-1", Some(500)),
            ("1E", Some(u64::MAX)),
            ("16Ei", Some(u64::MAX)),
            ("", None),
            ("m", None),
            ("-1", None),
            ("1Zi", None),
            ("abc", None),
            ("1.2.3", None),
            ("1e99", None),
        ] {
            assert_eq!(milli(text), want, "{text:?}");
        }
    }
}
