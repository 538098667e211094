//! A comparison of NVIDIA's hook and Divvy's when they are called directly, as by Docker's `--gpus`.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{BY_ENVIRONMENT, Machine, NOT_BY_ENVIRONMENT, Request, Whose, env, mounted, visible};

const NAME: &str = "nvidia-container-runtime-hook";

/// A call of the hook: the mode in `config.toml`, the arguments, and the key under which the state names the bundle.
struct Call {
    mode: &'static str,
    words: &'static str,
    bundle: &'static str,
    /// The current directory of the call.
    directory: &'static str,
    request: Request,
}

/// Return a call as dockerd makes it for an unprivileged container, with settings that do not say whether the environment counts.
fn gpus(request: Request) -> Call {
    let with_hook = |config: &mut Value| {
        config["hooks"] = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": [NAME, "prestart"]}]});
    };
    Call {
        mode: "auto",
        words: "prestart",
        bundle: "bundle",
        directory: "bundle",
        request: request.top("").changed(with_hook),
    }
}

impl Call {
    fn mode(mut self, mode: &'static str) -> Call {
        self.mode = mode;
        self
    }

    fn words(mut self, words: &'static str) -> Call {
        self.words = words;
        self
    }

    fn with(mut self, change: fn(Request) -> Request) -> Call {
        self.request = change(self.request);
        self
    }

    /// Make the call. Return its exit status, and the arguments of `nvidia-container-cli`.
    fn made(&self, machine: &Machine, whose: Whose) -> (Option<i32>, Vec<String>) {
        let bed = &machine.bed;
        machine.prepare(whose, self.mode, &self.request);
        let called = bed.path("called");
        let _ = fs::remove_file(&called);
        let program = match whose {
            Whose::Theirs => machine.programs.join(NAME),
            Whose::Ours => {
                let link = bed.path(NAME);
                if !link.exists() {
                    symlink(env!("CARGO_BIN_EXE_divvy-runtime"), &link).expect("linked");
                }
                link
            }
        };
        let config = bed.path("config.toml");
        let words = self.words.replace("CONFIG", config.to_str().expect("text"));
        let mut command = Command::new(program);
        command
            .args(words.split(' ').filter(|word| !word.is_empty()))
            .current_dir(bed.path(self.directory))
            .env_remove("NVIDIA_CTK_CONFIG_FILE_PATH")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if !self.words.contains("-config") {
            command.env("NVIDIA_CTK_CONFIG_FILE_PATH", &config);
        }
        let mut child = command.spawn().expect("it runs");
        let state = json!({"ociVersion": "1.0.2", "id": "c1", "pid": 4242, self.bundle: bed.path("bundle")}).to_string();
        // The program may end before it reads its input.
        let _ = child.stdin.take().expect("its input").write_all(state.as_bytes());
        let status = child.wait().expect("it ends").code();
        let words = fs::read_to_string(called).unwrap_or_default();
        (status, words.lines().map(str::to_owned).collect())
    }
}

type Row = (Call, Option<&'static str>);

fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut same = |call| rows.push((call, None));
    for mode in ["auto", "legacy", "cdi", "jit-cdi"] {
        for value in ["all", "0", "0,1", "GPU-x", "0:1", "none", "void", "", "7"] {
            same(gpus(visible(value)).mode(mode));
        }
        same(gpus(env(&[])).mode(mode));
        same(
            gpus(visible("0"))
                .mode(mode)
                .with(|request| request.tables("[nvidia-container-runtime-hook]\nskip-mode-detection = true\n")),
        );
    }
    same(gpus(visible("0")).mode("bogus"));
    // The image's variables, followed by Docker's.
    same(gpus(visible("all").and("NVIDIA_VISIBLE_DEVICES=1")));
    same(gpus(visible("all").and("NVIDIA_VISIBLE_DEVICES=void")));
    same(gpus(
        visible("0")
            .and("NVIDIA_DRIVER_CAPABILITIES=compute,video")
            .and("NVIDIA_DRIVER_CAPABILITIES=utility"),
    ));
    same(gpus(visible("0").and("NVIDIA_DRIVER_CAPABILITIES=foo")));
    same(gpus(visible("0").and("NVIDIA_REQUIRE_CUDA=cuda>=12.4")));
    same(gpus(visible("0").and("NVIDIA_MIG_CONFIG_DEVICES=all")));
    same(gpus(visible("0").and("NVIDIA_MIG_CONFIG_DEVICES=all").privileged()));
    same(gpus(visible("0").and("CUDA_VERSION=foo")));
    same(gpus(visible("0")).with(|request| request.top(BY_ENVIRONMENT)));
    same(gpus(visible("0")).with(|request| request.top(NOT_BY_ENVIRONMENT)));
    same(gpus(visible("0")).with(|request| request.top(NOT_BY_ENVIRONMENT).privileged()));
    same(gpus(mounted(&["/1"])).with(|request| request.top("accept-nvidia-visible-devices-as-volume-mounts = true\n")));
    same(gpus(visible("nvidia.com/gpu=0")));
    same(gpus(visible("nvidia.com/gpu=0")).mode("cdi"));
    same(gpus(visible("0")).with(|request| request.top("supported-driver-capabilities = \"bogus\"\n")));
    same(Call {
        bundle: "bundlePath",
        ..gpus(visible("0"))
    });
    for words in [
        "-debug prestart",
        "--debug=true prestart",
        "-debug=false prestart",
        "-debug=x prestart",
        "prestart -debug",
        "-config CONFIG prestart",
        "--config=CONFIG prestart",
        "-config=/nowhere prestart",
        "-config",
        "-- prestart",
        "poststart",
        "poststop",
        "version",
        "-version",
        "-version bogus",
        "-help",
        "-x prestart",
        "bogus",
        "",
    ] {
        same(gpus(visible("0")).words(words));
    }
    same(
        gpus(visible("0"))
            .words("-debug prestart")
            .with(|request| request.tables("[cli]\ndebug = \"/nowhere/log\"\n")),
    );
    let mut apart = |call, why| rows.push((call, Some(why)));
    let image = "an image cannot give a container a GPU unless the settings allow it";
    apart(gpus(env(&["CUDA_VERSION=9.0"])), image);
    apart(gpus(visible("all")).with(|request| request.changed(|_| ())), image);
    apart(
        gpus(visible("all")).with(|request| request.annotated("io.container.manager", "libpod")),
        image,
    );
    apart(
        gpus(visible("0")).with(|request| request.top("swarm-resource = \"OF_IMAGE\"\n").and("OF_IMAGE=all")),
        image,
    );
    let root = "a container's root is relative to its bundle, not to the current directory of the hook";
    apart(
        Call {
            directory: ".",
            ..gpus(visible("0"))
        },
        root,
    );
    let said = "a request that the program does not understand is refused before the call";
    apart(gpus(visible("nvidia.com/gpu=0")).mode("legacy"), said);
    apart(gpus(visible("void")).mode("bogus"), "an unknown mode is an error at once");
    rows
}

/// This holds where Docker calls the hook.
#[test]
fn our_hook_calls_nvidias_program_like_nvidias_hook() {
    let Some(machine) = Machine::new(NAME) else { return };
    let mut wrong = Vec::new();
    for (call, why) in rows() {
        let (theirs, ours) = (call.made(&machine, Whose::Theirs), call.made(&machine, Whose::Ours));
        if (theirs == ours) != why.is_none() {
            let (env, top) = (&call.request.env, &call.request.top);
            wrong.push(format!(
                "{} {:?} {env:?} {top:?}:\n  theirs {theirs:?}\n  ours   {ours:?}",
                call.mode, call.words
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
