//! The settings of `config-manager`.

use crate::select::{Fallback, Unlabelled};
use crate::{Error, Invocation};

/// The settings of `config-manager`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigManager {
    /// Whether the file is chosen once, without a signal.
    pub oneshot: bool,
    /// The path of the kubeconfig file, if one is given.
    pub kubeconfig: Option<String>,
    /// The name of this node.
    pub node: String,
    /// The key of the node label whose value names the file.
    pub label: String,
    /// The directory with the configuration files.
    pub directory: String,
    /// The path of the symbolic link to the chosen file.
    pub destination: String,
    /// What a node without the label gets.
    pub unlabelled: Unlabelled,
    /// The signal after each change; `None` if none is sent.
    pub signal: Option<SignalTo>,
}

/// A signal and its receivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignalTo {
    /// The signal's number.
    pub number: i32,
    /// The exact text of the receivers' first argument, under which a process was started.
    pub process: String,
}

impl Invocation {
    /// Return the settings of `config-manager`.
    ///
    /// # Errors
    /// Fails if a required flag is missing, or if a value is not allowed.
    pub fn config_manager(&self) -> Result<ConfigManager, Error> {
        let required = |name: &'static str, default: &'static str| match self.text(name).unwrap_or(default) {
            "" => Err(Error::Missing(name)),
            text => Ok(text.to_owned()),
        };
        let optional = |name| self.filled(name).map(str::to_owned);
        let oneshot = self.boolean("oneshot")?.unwrap_or(false);
        let sends = self.boolean("send-signal")?.unwrap_or(true);
        let mut fallbacks = self.list("fallback-strategies").unwrap_or_default();
        fallbacks.retain(|name| !name.is_empty());
        Ok(ConfigManager {
            oneshot,
            kubeconfig: optional("kubeconfig"),
            node: required("node-name", "")?,
            label: required("node-label", "nvidia.com/device-plugin.config")?,
            directory: required("config-file-srcdir", "")?,
            destination: required("config-file-dst", "")?,
            unlabelled: Unlabelled {
                default: optional("default-config"),
                fallbacks: fallbacks.iter().map(|text| Fallback::parse(text)).collect::<Result<_, _>>()?,
            },
            signal: if sends && !oneshot {
                Some(SignalTo {
                    number: self.signal_number()?,
                    process: required("process-to-signal", "nvidia-device-plugin")?,
                })
            } else {
                None
            },
        })
    }

    fn signal_number(&self) -> Result<i32, Error> {
        let text = self.text("signal").unwrap_or("1");
        text.parse().map_err(|_| {
            Error::flags(format!(
                "--signal (SIGNAL) is {text:?}, which is not the number of a signal; write 1 for SIGHUP"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Environment, NvidiaProgram};

    fn of(arguments: &[&str], variables: &[(&str, &str)]) -> Result<ConfigManager, Error> {
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let pairs = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let environment: Environment = pairs.collect();
        Invocation::parse(NvidiaProgram::ConfigManager, "1", &arguments, &environment)
            .expect("arguments")
            .config_manager()
    }

    const REQUIRED: [(&str, &str); 3] = [
        ("NODE_NAME", "n1"),
        ("CONFIG_FILE_SRCDIR", "/available-configs"),
        ("CONFIG_FILE_DST", "/config/config.yaml"),
    ];

    fn with(more: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        [&REQUIRED[..], more].concat()
    }

    #[test]
    fn what_nvidias_chart_sets_is_understood() {
        let common = [
            ("KUBECONFIG", ""),
            ("NODE_LABEL", "nvidia.com/device-plugin.config"),
            ("DEFAULT_CONFIG", ""),
            ("FALLBACK_STRATEGIES", "named,single"),
        ];
        let init = [
            ("ONESHOT", "true"),
            ("SEND_SIGNAL", "false"),
            ("SIGNAL", ""),
            ("PROCESS_TO_SIGNAL", ""),
        ];
        let sidecar = [
            ("ONESHOT", "false"),
            ("SEND_SIGNAL", "true"),
            ("SIGNAL", "1"),
            ("PROCESS_TO_SIGNAL", "gpu-feature-discovery"),
        ];
        let expected = ConfigManager {
            oneshot: true,
            kubeconfig: None,
            node: "n1".to_owned(),
            label: "nvidia.com/device-plugin.config".to_owned(),
            directory: "/available-configs".to_owned(),
            destination: "/config/config.yaml".to_owned(),
            unlabelled: Unlabelled {
                default: None,
                fallbacks: vec![Fallback::Named, Fallback::Single],
            },
            signal: None,
        };
        assert_eq!(of(&[], &with(&[&common[..], &init].concat())), Ok(expected.clone()));
        let signal = Some(SignalTo {
            number: 1,
            process: "gpu-feature-discovery".to_owned(),
        });
        let expected = ConfigManager {
            oneshot: false,
            signal,
            ..expected
        };
        assert_eq!(of(&[], &with(&[&common[..], &sidecar].concat())), Ok(expected));
    }

    #[test]
    fn the_defaults_are_nvidias_and_a_flag_wins_over_its_variable() {
        let read = of(&[], &with(&[])).expect("enough");
        assert_eq!(
            (read.label.as_str(), read.unlabelled, read.oneshot),
            ("nvidia.com/device-plugin.config", Unlabelled::default(), false)
        );
        let signal = SignalTo {
            number: 1,
            process: "nvidia-device-plugin".to_owned(),
        };
        assert_eq!(read.signal, Some(signal));
        let arguments = [
            "--node-name=n2",
            "-node-label=l",
            "--config-file-srcdir=/s",
            "--config-file-dst=/d",
            "--default-config=c",
            "--fallback-strategies=empty",
            "--fallback-strategies=named",
            "--kubeconfig=/k",
            "--signal=10",
            "--process-to-signal=p",
            "--send-signal",
            "--oneshot=false",
        ];
        let variables = [
            ("NODE_LABEL", "x"),
            ("DEFAULT_CONFIG", "x"),
            ("FALLBACK_STRATEGIES", "x"),
            ("KUBECONFIG", "x"),
            ("SIGNAL", "x"),
            ("PROCESS_TO_SIGNAL", "x"),
            ("SEND_SIGNAL", "false"),
            ("ONESHOT", "true"),
        ];
        let expected = ConfigManager {
            oneshot: false,
            kubeconfig: Some("/k".to_owned()),
            node: "n2".to_owned(),
            label: "l".to_owned(),
            directory: "/s".to_owned(),
            destination: "/d".to_owned(),
            unlabelled: Unlabelled {
                default: Some("c".to_owned()),
                fallbacks: vec![Fallback::Empty, Fallback::Named],
            },
            signal: Some(SignalTo {
                number: 10,
                process: "p".to_owned(),
            }),
        };
        assert_eq!(of(&arguments, &with(&variables)), Ok(expected));
    }

    #[test]
    fn what_is_missing_or_not_allowed_is_refused_with_nvidias_text() {
        for (variables, expected) in [
            (vec![], "invalid <node-name>: must not be empty string"),
            (with(&[("NODE_LABEL", "")]), "invalid <node-label>: must not be empty string"),
            (
                REQUIRED[..1].to_vec(),
                "invalid <config-file-srcdir>: must not be empty string",
            ),
            (REQUIRED[..2].to_vec(), "invalid <config-file-dst>: must not be empty string"),
            (
                with(&[("FALLBACK_STRATEGIES", "named,other")]),
                "unknown fallback strategy: other",
            ),
            // NVIDIA's program searches for a process without a name.
            (
                with(&[("PROCESS_TO_SIGNAL", "")]),
                "invalid <process-to-signal>: must not be empty string",
            ),
            (
                with(&[("SIGNAL", "HUP")]),
                "unable to validate flags: --signal (SIGNAL) is \"HUP\", which is not the number of a signal; write 1 for SIGHUP",
            ),
            (
                with(&[("ONESHOT", "maybe")]),
                "could not parse \"maybe\" as bool value from environment variable \"ONESHOT\" for flag oneshot; write true or false",
            ),
        ] {
            assert_eq!(
                of(&[], &variables).map_err(|error| error.to_string()),
                Err(expected.to_owned())
            );
        }
        let quiet = of(&[], &with(&[("SEND_SIGNAL", ""), ("PROCESS_TO_SIGNAL", "")])).expect("no signal");
        assert_eq!(quiet.signal, None);
        let once = of(&["--oneshot"], &with(&[("SEND_SIGNAL", "true")])).expect("no signal");
        assert_eq!(once.signal, None);
        let nothing = of(&["--default-config=", "--kubeconfig="], &with(&[])).expect("as if not given");
        assert_eq!((nothing.unlabelled.default, nothing.kubeconfig), (None, None));
    }
}
