//! `gpu-bridge doctor`: what is missing on this node or in its cluster, why it matters, and what to do.

use std::fmt::Write as _;

use clap::Args;

use super::paint::{Colours, Paint};
use super::run::{Mistakes, RunArgs};
use super::table::{LINE, wrap};
use crate::daemon::{self, Finding, Level};

/// Where it is told what a finding is about: behind the longest level.
const LEVEL: usize = 9;
/// Where the text of a finding begins: behind its level and what it is about.
const INDENT: usize = 25;

/// The flags of `doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    run: RunArgs,
}

/// What the doctor found, for people.
#[derive(Debug)]
pub(super) struct Diagnosis {
    /// The page.
    pub(super) text: String,
    /// How many problems there are.
    pub(super) problems: usize,
}

impl DoctorArgs {
    /// Looks at everything.
    ///
    /// # Errors
    /// Flags are wrong.
    pub(super) async fn examine(self) -> Result<Diagnosis, Mistakes> {
        let options = self.run.check()?;
        let found = daemon::examine(&options).await;
        Ok(describe(&found, Colours::of_standard_output()))
    }
}

fn describe(found: &[Finding], colours: Colours) -> Diagnosis {
    let mut text = String::new();
    let mut line = |head: String, rest: &str| {
        let broken = wrap(rest, LINE - INDENT, 0);
        let broken = broken.replace('\n', &format!("\n{:INDENT$}", ""));
        // Writing to a String can't fail.
        let _ = writeln!(text, "{head}{broken}");
    };
    for finding in found {
        let paint = match finding.level {
            Level::Ok => Paint::Green,
            Level::Warning => Paint::Yellow,
            Level::Problem => Paint::Red,
        };
        let level = finding.level.as_str();
        // Codes have no width, and what is missing of it stands behind them.
        let head = colours.paint(paint).on(level);
        let about = format!("{:1$}", "", LEVEL - level.len()) + finding.about;
        line(
            format!("{head}{about:0$}", INDENT - level.len()),
            &finding.what,
        );
        if let Some(advice) = &finding.advice {
            line(" ".repeat(INDENT), &format!("why: {}", advice.why));
            line(" ".repeat(INDENT), &format!("do: {}", advice.to_do));
        }
    }
    let count = |level| found.iter().filter(|it| it.level == level).count();
    let (problems, warnings) = (count(Level::Problem), count(Level::Warning));
    let _ = writeln!(
        text,
        "\n{problems} problems, {warnings} warnings, {} checks in all",
        found.len()
    );
    Diagnosis { text, problems }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::daemon::Advice;

    #[test]
    fn each_line_says_how_it_stands_and_what_is_not_good_says_why_and_what_to_do() {
        let finding = |level, what: &str, advice: Option<(&str, &str)>| Finding {
            level,
            about: "device plugins",
            what: what.to_owned(),
            advice: advice.map(|(why, to_do)| Advice {
                why: why.to_owned(),
                to_do: to_do.to_owned(),
            }),
        };
        let found = [
            finding(Level::Ok, "/var/lib/kubelet/device-plugins", None),
            finding(
                Level::Problem,
                "there is no folder /var/lib/kubelet/device-plugins",
                Some((
                    "counted pods are served by a socket in it, and this is a sentence that goes on for longer than a line",
                    "give another --device-plugin-dir",
                )),
            ),
        ];
        let diagnosis = describe(&found, Colours::Off);
        assert_eq!(diagnosis.problems, 1);
        expect![[r#"
            ok       device plugins  /var/lib/kubelet/device-plugins
            problem  device plugins  there is no folder /var/lib/kubelet/device-plugins
                                     why: counted pods are served by a socket in it, and this is a sentence that
                                     goes on for longer than a line
                                     do: give another --device-plugin-dir

            1 problems, 0 warnings, 2 checks in all
        "#]]
        .assert_eq(&diagnosis.text);
        let coloured = describe(&found, Colours::Shown).text;
        assert!(coloured.contains("\x1b[31mproblem\x1b[0m"), "{coloured}");
    }
}
