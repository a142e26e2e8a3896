//! Colours of a terminal.

use std::io::IsTerminal as _;

/// What a text looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Paint {
    /// As any other text.
    None,
    /// Good.
    Green,
    /// On its way.
    Yellow,
    /// Somebody should look at it.
    Red,
    /// A heading.
    Bold,
}

impl Paint {
    /// The text between the codes of ECMA-48 that switch it on and off.
    pub(super) fn on(self, text: &str) -> String {
        let code = match self {
            Self::None => return text.to_owned(),
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Red => "31",
            Self::Bold => "1",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Whether answers may be coloured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Colours {
    /// A person looks at a terminal that can show them, and wants them.
    Shown,
    /// A file, a pipe, or somebody who wants none.
    Off,
}

impl Colours {
    /// What holds for standard output.
    pub(super) fn of_standard_output() -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self::of(std::io::stdout().is_terminal(), no_color, dumb)
    }

    /// `no_color`: the variable NO_COLOR is set and not empty (no-color.org). `dumb`: the terminal knows no codes.
    fn of(is_terminal: bool, no_color: bool, dumb: bool) -> Self {
        if is_terminal && !no_color && !dumb {
            Self::Shown
        } else {
            Self::Off
        }
    }

    /// This colour, where there are any.
    pub(super) fn paint(self, paint: Paint) -> Paint {
        match self {
            Self::Shown => paint,
            Self::Off => Paint::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_a_terminal_of_somebody_who_wants_them() {
        assert_eq!(Colours::of(true, false, false), Colours::Shown);
        assert_eq!(Colours::of(false, false, false), Colours::Off, "a pipe");
        assert_eq!(Colours::of(true, true, false), Colours::Off, "NO_COLOR");
        assert_eq!(Colours::of(true, false, true), Colours::Off, "TERM=dumb");
        assert_eq!(Colours::Off.paint(Paint::Red).on("x"), "x");
        assert_eq!(Colours::Shown.paint(Paint::Red).on("x"), "\x1b[31mx\x1b[0m");
    }
}
