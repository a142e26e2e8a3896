//! Tests of the rules: single cases here, scripts in `tests/scenarios`, random histories beside them.

mod kit;
mod overlaps;
mod regressions;
mod scenarios;
