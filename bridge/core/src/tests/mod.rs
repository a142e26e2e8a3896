//! Tests of the rules: single cases here, scripts in `tests/scenarios`, random histories beside them.

mod adoption;
mod health;
mod histories;
mod kit;
mod leaving;
mod lost_race;
mod nodes;
mod overlaps;
mod refusals;
mod regressions;
mod release;
mod scenarios;
mod steering;
mod topology;
