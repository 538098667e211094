//! A real Kubernetes on this machine, with Divvy on it: a front for the scripts in `e2e/`, which do the work and can be used alone.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::build;

const HELP: &str = "\
A real Kubernetes on this machine, and Divvy on it

usage: cargo xtask cluster COMMAND

  up [--nodes N] [--rbac] [--service-accounts]
                            etcd, kube-apiserver, kube-scheduler, kube-controller-manager, and for each node containerd, runc
                            and a kubelet; what is not built yet is built first, from Go modules (6 minutes, once)
  divvy [--machines FILE]   builds Divvy and puts it on the cluster that is up: extender, agents, simulated GPUs
  divvy --down              takes Divvy off it again
  install [--image FILE]    puts Divvy on the cluster as a user does, in place of `divvy`: the image of `cargo xtask image`, the objects
                            of `divvy manifests`; and checks them. Needs `up --nodes 2 --rbac --service-accounts`
  install --down            takes it off again
  tutorial [SCENE...]       plays the tutorial and its accidents on them, and checks each step; scenes are in e2e/tutorial.sh
  status                    what runs: process numbers, versions, nodes, KUBECONFIG
  restart [-9] NAME...      restarts (-9: kills first) kube-scheduler, n1.kubelet, n1.containerd, n1.agent, divvy-extender, ...
  enter NODE COMMAND...     runs a command where /var/lib/kubelet, /run/containerd, /run/cdi and /dev are that node's
  down [--keep-logs]        ends all of it, and looks that nothing is left on the machine
  build                     only builds

Examples:
  cargo xtask cluster up && cargo xtask cluster divvy
  export KUBECONFIG=/tmp/divvy-cluster/admin.kubeconfig       (`status` prints the line, with kubectl's folder)
  kubectl get nodes
  cargo xtask cluster up --nodes 2                            a second node, now or later: what runs is left alone
  cargo xtask cluster down && cargo xtask cluster up --rbac   with Node and RBAC authorization
  cargo xtask cluster restart -9 n1.kubelet
  cargo xtask cluster enter n1 ls -l /dev/nvidia0

Needs root, Go, gcc, pkg-config, openssl and a Go module proxy; no container engine, no registry, no GPU. Where one of them is missing
it says which, what can therefore not be tested, and ends with status 77: skipped, not passed. Everything is built into
~/.cache/divvy-cluster/ (0.5 GB); state and logs are in CLUSTER_DIR (/tmp/divvy-cluster). More settings: e2e/README.md.";

/// What is to be done: the scripts of `e2e/` with arguments and environment, one after another while they succeed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    script: &'static str,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
    needs_divvy: bool,
}

/// The script's status is ours: 77 says that this machine lacks something.
pub(crate) fn run(args: &[&str]) -> Result<ExitCode> {
    if matches!(args, [] | ["--help" | "-h" | "help"] | [_, "--help" | "-h"]) {
        #[expect(clippy::print_stdout, reason = "help that was asked for is data")]
        {
            println!("{HELP}");
        }
        return Ok(if args.is_empty() {
            ExitCode::from(2)
        } else {
            ExitCode::SUCCESS
        });
    }
    let mut plan = plan(args)?;
    if plan.needs_divvy {
        build::cargo(&[
            "build",
            "--quiet",
            "-p",
            "divvy",
            "-p",
            "divvy-hardware",
            "-p",
            "divvy-nvml-sim",
        ])?;
        let folder = std::path::absolute(build::debug_folder()).context("the folder of cargo's builds")?;
        plan.env.push(("DIVVY_BIN", folder.display().to_string()));
    }
    let script = e2e().join(plan.script);
    let status = Command::new("bash")
        .arg(&script)
        .args(&plan.args)
        .envs(plan.env)
        .status()
        .with_context(|| format!("bash {} could not be run", script.display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

fn e2e() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e")
}

fn plan(args: &[&str]) -> Result<Plan> {
    let (command, rest) = args.split_first().context(HELP)?;
    let owned = |args: &[&str]| args.iter().map(|arg| (*arg).to_owned()).collect();
    match *command {
        "up" => up(rest),
        "divvy" => divvy(rest),
        "install" => install(rest),
        "tutorial" => Ok(Plan {
            script: "tutorial.sh",
            args: owned(rest),
            ..Plan::default()
        }),
        "status" if rest.is_empty() => Ok(Plan {
            script: "status.sh",
            ..Plan::default()
        }),
        "build" => Ok(Plan {
            script: "build.sh",
            args: owned(rest),
            ..Plan::default()
        }),
        "down" if matches!(rest, [] | ["--keep-logs"]) => Ok(Plan {
            script: "down.sh",
            args: owned(rest),
            ..Plan::default()
        }),
        "restart" if !rest.is_empty() => Ok(Plan {
            script: "part.sh",
            args: owned(args),
            ..Plan::default()
        }),
        "enter" if rest.len() >= 2 => Ok(Plan {
            script: "enter.sh",
            args: owned(rest),
            ..Plan::default()
        }),
        _ => bail!(
            "`cargo xtask cluster {}` is not understood; `cargo xtask cluster --help` shows what is",
            args.join(" ")
        ),
    }
}

fn up(mut args: &[&str]) -> Result<Plan> {
    let mut env = Vec::new();
    while let [flag, rest @ ..] = args {
        args = rest;
        match (*flag, rest) {
            ("--rbac", _) => env.push(("AUTHORIZATION", "RBAC".to_owned())),
            ("--service-accounts", _) => env.push(("SERVICE_ACCOUNTS", "1".to_owned())),
            ("--nodes", [number, rest @ ..]) => {
                args = rest;
                let valid = number.parse::<u8>().is_ok_and(|number| (1..=9).contains(&number));
                ensure!(
                    valid,
                    "--nodes {number}: write a number from 1 to 9; all of them run on this machine"
                );
                env.push(("NODES", (*number).to_owned()));
            }
            _ => bail!("`up {flag}` is not understood; up takes --nodes N, --rbac and --service-accounts"),
        }
    }
    Ok(Plan {
        script: "up.sh",
        env,
        ..Plan::default()
    })
}

fn divvy(args: &[&str]) -> Result<Plan> {
    let up = |env| Plan {
        script: "divvy.sh",
        args: vec!["up".to_owned()],
        env,
        needs_divvy: true,
    };
    match args {
        [] => Ok(up(Vec::new())),
        ["--machines", file] => Ok(up(vec![("MACHINES", (*file).to_owned())])),
        ["--down"] => Ok(Plan {
            script: "divvy.sh",
            args: vec!["down".to_owned()],
            ..Plan::default()
        }),
        _ => bail!(
            "`divvy {}` is not understood; divvy takes --machines FILE or --down",
            args.join(" ")
        ),
    }
}

fn install(args: &[&str]) -> Result<Plan> {
    let image = match args {
        [] => crate::image::default_file()?,
        ["--image", file] => (*file).to_owned(),
        ["--down"] => {
            return Ok(Plan {
                script: "install.sh",
                args: vec!["down".to_owned()],
                ..Plan::default()
            });
        }
        _ => bail!(
            "`install {}` is not understood; install takes --image FILE or --down",
            args.join(" ")
        ),
    };
    Ok(Plan {
        script: "install.sh",
        args: vec!["up-and-check".to_owned()],
        env: vec![("IMAGE", image)],
        needs_divvy: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_the_scripts_get() {
        let env = |args: &[&str]| plan(args).expect("understood").env;
        assert_eq!(env(&["up"]), []);
        assert_eq!(
            env(&["up", "--rbac", "--nodes", "2"]),
            [("AUTHORIZATION", "RBAC".to_owned()), ("NODES", "2".to_owned())]
        );
        assert_eq!(
            plan(&["restart", "-9", "n1.kubelet"]).expect("understood").args,
            ["restart", "-9", "n1.kubelet"]
        );
        assert_eq!(
            plan(&["enter", "n1", "ls", "-l"]).expect("understood").args,
            ["n1", "ls", "-l"]
        );
        assert!(plan(&["divvy"]).expect("understood").needs_divvy);
        assert_eq!(env(&["up", "--service-accounts"]), [("SERVICE_ACCOUNTS", "1".to_owned())]);
        assert_eq!(env(&["install", "--image", "x.tar"]), [("IMAGE", "x.tar".to_owned())]);
        assert_eq!(plan(&["install", "--down"]).expect("understood").args, ["down"]);
        assert!(!plan(&["divvy", "--down"]).expect("understood").needs_divvy);
    }

    #[test]
    fn what_is_not_understood_is_refused_with_what_is() {
        for args in [
            &["up", "--nodes"][..],
            &["up", "--nodes", "0"],
            &["up", "--nodes", "10"],
            &["up", "--node", "1"],
            &["down", "now"],
            &["restart"],
            &["enter", "n1"],
            &["divvy", "--machines"],
            &["install", "--image"],
            &["nonsense"],
        ] {
            let text = plan(args).expect_err("not understood").to_string();
            assert!(
                text.contains("takes --") || text.contains("1 to 9") || text.contains("--help"),
                "{text}"
            );
        }
    }

    /// A go.mod that is moved alone would build another cluster than `e2e/versions.env` says.
    #[test]
    fn versions_are_chosen_in_one_place() {
        let output = Command::new("bash")
            .arg(e2e().join("build.sh"))
            .arg("--check")
            .output()
            .expect("bash is there");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn every_script_that_the_help_names_is_there_and_is_a_script() {
        for name in [
            "up.sh",
            "down.sh",
            "status.sh",
            "build.sh",
            "part.sh",
            "enter.sh",
            "divvy.sh",
            "install.sh",
            "tutorial.sh",
        ] {
            let path = e2e().join(name);
            let output = Command::new("bash").arg("-n").arg(&path).output().expect("bash is there");
            assert!(path.is_file() && output.status.success(), "{name}: {output:?}");
        }
    }
}
