//! A configuration file as a whole: what holds everywhere, and the profiles that override it on some nodes.

use std::collections::BTreeMap;

use super::Config;

/// What a file says. The default is an empty one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Document {
    /// What holds on a node without a profile.
    pub base: Config,
    /// What holds with each profile: the keys of the file with those of the profile over them.
    pub profiles: BTreeMap<String, Config>,
    /// What of NVIDIA's file is not done, key by key; nothing of a file of our own is left undone.
    pub remarks: Vec<String>,
}

impl Document {
    /// What holds on a node whose label names this profile; where a file has no profiles, the label says nothing.
    ///
    /// # Errors
    /// There is no such profile: the names that there are.
    pub fn choose(&self, profile: Option<&str>) -> Result<&Config, Vec<&str>> {
        let Some(name) = profile.filter(|_| !self.profiles.is_empty()) else {
            return Ok(&self.base);
        };
        let known = || self.profiles.keys().map(String::as_str).collect();
        self.profiles.get(name).ok_or_else(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_chooses_among_profiles_and_says_nothing_where_there_are_none() {
        let mut document = Document::default();
        assert_eq!(document.choose(Some("any")), Ok(&document.base));
        let mut small = Config::default();
        small.settings.min_legacy = 1;
        document.profiles.insert("small".to_owned(), small.clone());
        assert_eq!(document.choose(None), Ok(&document.base));
        assert_eq!(document.choose(Some("small")), Ok(&small));
        assert_eq!(document.choose(Some("any")), Err(vec!["small"]));
    }
}
