//! Which configuration file a node gets: the decision of `config-manager`.

use std::collections::BTreeSet;

use crate::Error;

/// The name of the file that [`Fallback::Named`] chooses.
const NAMED: &str = "default";

/// The names of the configuration files that can be chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Available(BTreeSet<String>);

impl Available {
    /// Select the names that can be chosen from a directory's entries. An entry is its name, and whether it is a regular file.
    ///
    /// Names with two dots at the beginning are those of the kubelet in a mounted ConfigMap. A name with a slash would lead out of the
    /// directory.
    pub fn of(entries: impl IntoIterator<Item = (String, bool)>) -> Available {
        let can_be_chosen = |name: &str| !name.is_empty() && name != "." && !name.starts_with("..") && !name.contains('/');
        let files = entries.into_iter().filter(|(name, is_file)| *is_file && can_be_chosen(name));
        Available(files.map(|(name, _)| name).collect())
    }

    /// Return the names in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    fn named(&self, name: &str) -> Result<Chosen, Error> {
        match self.0.get(name) {
            Some(name) => Ok(Chosen::File(name.clone())),
            None => Err(Error::NoSuchConfig(name.to_owned())),
        }
    }
}

/// How to choose a file for a node without a label and without a default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// `named`: the file `default`.
    Named,
    /// `single`: the only file.
    Single,
    /// `empty`: no file, which is an empty configuration.
    Empty,
}

impl Fallback {
    /// Parse the name of a strategy.
    ///
    /// # Errors
    /// Fails if there is no strategy of this name.
    pub(crate) fn parse(text: &str) -> Result<Fallback, Error> {
        match text {
            "named" => Ok(Fallback::Named),
            "single" => Ok(Fallback::Single),
            "empty" => Ok(Fallback::Empty),
            other => Err(Error::UnknownFallback(other.to_owned())),
        }
    }

    fn choose(self, available: &Available) -> Option<Chosen> {
        match self {
            Fallback::Named => available.named(NAMED).ok(),
            Fallback::Single if available.0.len() == 1 => available.0.first().cloned().map(Chosen::File),
            Fallback::Single => None,
            Fallback::Empty => Some(Chosen::Empty),
        }
    }
}

/// What is chosen for a node without a label.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unlabelled {
    /// The name of the file, if one is given. It is chosen or nothing is.
    pub default: Option<String>,
    /// What to try without `default`, in this order.
    pub fallbacks: Vec<Fallback>,
}

impl Unlabelled {
    fn choose(&self, available: &Available) -> Result<Chosen, Error> {
        if let Some(name) = &self.default {
            return available.named(name);
        }
        let mut chosen = self.fallbacks.iter().filter_map(|fallback| fallback.choose(available));
        chosen.next().ok_or(Error::NothingChosen)
    }
}

/// A chosen configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chosen {
    /// The file of this name in the directory.
    File(String),
    /// An empty configuration.
    Empty,
}

/// A decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// The configuration to use. With `None`, what is in use stays.
    pub chosen: Option<Chosen>,
    /// Why the configuration that was asked for is not used. Empty if it is.
    pub problems: Vec<Error>,
}

/// Choose the configuration of a node. `label` is the value of the node's label, which may be any text; an empty one counts as none. `in_use`
/// says whether the node has a configuration already.
///
/// A label that names no file changes nothing. If nothing is in use yet, the node gets what it would get without the label.
pub fn select(label: Option<&str>, available: &Available, unlabelled: &Unlabelled, in_use: bool) -> Selection {
    let keep = |problem| Selection {
        chosen: None,
        problems: vec![problem],
    };
    if available.0.is_empty() {
        return keep(Error::NoFiles);
    }
    let label = label.filter(|name| !name.is_empty());
    let asked_for = label.map_or_else(|| unlabelled.choose(available), |name| available.named(name));
    match asked_for {
        Ok(chosen) => Selection {
            chosen: Some(chosen),
            problems: Vec::new(),
        },
        Err(problem) if in_use || label.is_none() => keep(problem),
        Err(problem) => match unlabelled.choose(available) {
            Ok(chosen) => Selection {
                chosen: Some(chosen),
                problems: vec![problem],
            },
            Err(other) => Selection {
                chosen: None,
                problems: vec![problem, other],
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn files(names: &[&str]) -> Available {
        Available::of(names.iter().map(|name| ((*name).to_owned(), true)))
    }

    fn unlabelled(default: Option<&str>, fallbacks: &[Fallback]) -> Unlabelled {
        Unlabelled {
            default: default.map(str::to_owned),
            fallbacks: fallbacks.to_vec(),
        }
    }

    fn file(name: &str) -> Chosen {
        Chosen::File(name.to_owned())
    }

    #[test]
    fn only_files_of_the_directory_itself_can_be_chosen() {
        let entries = [
            ("a", true),
            ("directory", false),
            ("..data", true),
            ("..2026_01_01", false),
            ("...", true),
            (".hidden", true),
            ("..", true),
            (".", true),
            ("", true),
            ("a/b", true),
            ("/etc/passwd", true),
        ];
        let available = Available::of(entries.map(|(name, is_file)| (name.to_owned(), is_file)));
        assert_eq!(available.names().collect::<Vec<_>>(), [".hidden", "a"]);
    }

    #[test]
    fn label_default_and_fallbacks_win_in_this_order() {
        use Fallback::{Empty, Named, Single};
        let none = || Error::NothingChosen;
        let missing = |name: &str| Error::NoSuchConfig(name.to_owned());
        for (label, names, default, fallbacks, expected) in [
            (Some("a"), &["a", "b", "default"][..], Some("b"), &[Named][..], Ok(file("a"))),
            (None, &["a", "b", "default"], Some("b"), &[Named], Ok(file("b"))),
            (Some(""), &["a", "b"], Some("b"), &[], Ok(file("b"))),
            (None, &["a", "default"], None, &[Named, Single, Empty], Ok(file("default"))),
            (None, &["a", "default"], None, &[Single, Named], Ok(file("default"))),
            (None, &["a"], None, &[Named, Single, Empty], Ok(file("a"))),
            (None, &["a", "b"], None, &[Named, Single, Empty], Ok(Chosen::Empty)),
            (None, &["a", "default"], None, &[Empty, Named], Ok(Chosen::Empty)),
            (None, &["a", "b"], None, &[Named, Single], Err(none())),
            (None, &["a"], None, &[], Err(none())),
            // A default that was given is not replaced by something else.
            (None, &["a"], Some("b"), &[Single], Err(missing("b"))),
            (None, &[], None, &[Empty], Err(Error::NoFiles)),
            (Some("a"), &[], None, &[Empty], Err(Error::NoFiles)),
        ] {
            let given = format!("{label:?} {names:?} {default:?} {fallbacks:?}");
            let selection = select(label, &files(names), &unlabelled(default, fallbacks), false);
            match expected {
                Ok(chosen) => assert_eq!((selection.chosen, selection.problems), (Some(chosen), vec![]), "{given}"),
                Err(problem) => assert_eq!((selection.chosen, selection.problems), (None, vec![problem]), "{given}"),
            }
        }
    }

    #[test]
    fn an_unknown_name_changes_nothing_in_use() {
        let wrong = || Error::NoSuchConfig("wrong".to_owned());
        let with_default = unlabelled(Some("a"), &[]);
        let kept = select(Some("wrong"), &files(&["a"]), &with_default, true);
        assert_eq!((kept.chosen, kept.problems), (None, vec![wrong()]));
        let first = select(Some("wrong"), &files(&["a"]), &with_default, false);
        assert_eq!((first.chosen, first.problems), (Some(file("a")), vec![wrong()]));
        let nothing = select(Some("wrong"), &files(&["a"]), &unlabelled(None, &[]), false);
        assert_eq!(
            (nothing.chosen, nothing.problems),
            (None, vec![wrong(), Error::NothingChosen])
        );
    }

    fn fallback() -> impl Strategy<Value = Fallback> {
        prop::sample::select(vec![Fallback::Named, Fallback::Single, Fallback::Empty])
    }

    fn name() -> impl Strategy<Value = String> {
        prop_oneof![
            prop::sample::select(vec![
                "", ".", "..", "..data", "a", "b", "default", "a/b", "../a", "/a", "a\0b"
            ])
            .prop_map(str::to_owned),
            any::<String>(),
        ]
    }

    proptest! {
        /// For any other value of the label, a reason is given.
        #[test]
        fn a_label_chooses_only_files_of_the_directory(
            label in prop::option::of(name()),
            entries in prop::collection::vec((name(), any::<bool>()), 0..6),
            default in prop::option::of(name()),
            fallbacks in prop::collection::vec(fallback(), 0..4),
            in_use: bool,
        ) {
            let unlabelled = Unlabelled { default, fallbacks };
            let selection = select(label.as_deref(), &Available::of(entries.clone()), &unlabelled, in_use);
            let asked = label.as_deref().filter(|name| !name.is_empty());
            match &selection.chosen {
                Some(Chosen::File(name)) => {
                    prop_assert!(entries.contains(&(name.clone(), true)));
                    let parts: Vec<_> = std::path::Path::new(name).components().collect();
                    prop_assert!(matches!(parts[..], [std::path::Component::Normal(_)]) && !name.starts_with(".."), "{name:?}");
                    // Another file than the one that was asked for comes with a reason, and only if nothing is in use.
                    prop_assert!(asked.is_none_or(|asked| asked == name) || !in_use && !selection.problems.is_empty());
                }
                Some(Chosen::Empty) => prop_assert!(unlabelled.fallbacks.contains(&Fallback::Empty)),
                None => prop_assert!(!selection.problems.is_empty()),
            }
        }
    }
}
