//! Files of engines as they occur in practice, and the arguments of NVIDIA's tool.

use super::Tree;

pub(super) const DOCKER: &str = "/etc/docker/daemon.json";
pub(super) const CONTAINERD: &str = "/etc/containerd/config.toml";
pub(super) const CRIO: &str = "/etc/crio/crio.conf";

/// The name of an input, and the initial files of a machine, each with its path and text. A text without a path is the engine's
/// own file.
pub(super) type Input = (&'static str, &'static [(&'static str, &'static str)]);

pub(super) const OF_DOCKER: &[Input] = &[
    ("missing", &[]),
    ("empty", &[("", "")]),
    ("blank", &[("", "\n \n")]),
    ("an empty object", &[("", "{}")]),
    ("null", &[("", "null")]),
    ("a list", &[("", "[]")]),
    (
        "a tutorial's",
        &[(
            "",
            "{\"exec-opts\": [\"native.cgroupdriver=systemd\"], \"log-driver\": \"json-file\", \"log-opts\": {\"max-size\": \"100m\"}, \
             \"storage-driver\": \"overlay2\", \"default-runtime\": \"nvidia\", \
             \"runtimes\": {\"nvidia\": {\"path\": \"/usr/bin/nvidia-container-runtime\", \"runtimeArgs\": []}}}",
        )],
    ),
    (
        "features and a runtime",
        &[(
            "",
            "{\"features\": {\"buildkit\": true}, \"runtimes\": {\"kata\": {\"path\": \"/usr/bin/kata\"}}}",
        )],
    ),
    ("features null", &[("", "{\"features\": null}")]),
    ("features empty", &[("", "{\"features\": {}}")]),
    ("features a list", &[("", "{\"features\": [\"cdi\"]}")]),
    ("features a text", &[("", "{\"features\": \"cdi\"}")]),
    ("CDI off", &[("", "{\"features\": {\"cdi\": false}}")]),
    (
        "CDI on",
        &[("", "{\"features\": {\"cdi\": true, \"containerd-snapshotter\": true}}")],
    ),
    ("CDI a text", &[("", "{\"features\": {\"cdi\": \"yes\"}}")]),
    ("runtimes null", &[("", "{\"runtimes\": null, \"debug\": true}")]),
    ("runtimes empty", &[("", "{\"runtimes\": {}}")]),
    ("runtimes a list", &[("", "{\"runtimes\": []}")]),
    ("the runtime a text", &[("", "{\"runtimes\": {\"nvidia\": \"/usr/bin/n\"}}")]),
    (
        "another runtime a text",
        &[("", "{\"runtimes\": {\"kata\": \"/usr/bin/kata\"}}")],
    ),
    (
        "the runtime with arguments",
        &[(
            "",
            "{\"runtimes\": {\"nvidia\": {\"path\": \"/opt/x\", \"runtimeArgs\": [\"--debug\"]}}}",
        )],
    ),
    (
        "the runtime with arguments as NVIDIA writes them",
        &[(
            "",
            "{\"runtimes\": {\"nvidia\": {\"path\": \"/opt/x\", \"args\": [\"--debug\"]}}}",
        )],
    ),
    (
        "the runtime as a shim",
        &[(
            "",
            "{\"runtimes\": {\"nvidia\": {\"runtimeType\": \"io.containerd.runc.v2\", \"options\": {\"Root\": \"/run/x\"}}}}",
        )],
    ),
    (
        "another default",
        &[(
            "",
            "{\"default-runtime\": \"kata\", \"runtimes\": {\"kata\": {\"path\": \"/usr/bin/kata\"}}}",
        )],
    ),
    ("default null", &[("", "{\"default-runtime\": null}")]),
    ("default a number", &[("", "{\"default-runtime\": 5}")]),
    ("a comment", &[("", "{\n  // c\n  \"debug\": true\n}\n")]),
    ("no JSON", &[("", "{not json")]),
    ("half of it", &[("", "{\"debug\": true")]),
    ("more behind it", &[("", "{\"debug\": true} x")]),
    ("a comma too much", &[("", "{\"debug\": true,}")]),
    ("a byte order mark", &[("", "\u{feff}{}")]),
    ("keys twice", &[("", "{\"debug\": true, \"debug\": false}")]),
    (
        "unknown keys",
        &[(
            "",
            "{\"zzz\": 1, \"aaa\": {\"b\": [1, 2.5, null]}, \"big\": 9007199254740993, \"e\": 1e3, \"\\u00fc<&>\": \"\\u2028\"}",
        )],
    ),
];

const TABLE_V2: &str = "[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"registry.k8s.io/pause:3.9\"\n";

pub(super) const OF_CONTAINERD: &[Input] = &[
    ("missing", &[]),
    ("empty", &[("", "")]),
    ("a comment alone", &[("", "# nothing\n")]),
    ("version 1", &[("", include_str!("v1.toml"))]),
    (
        "version 1, written",
        &[("", "version = 1\n[plugins.cri]\n  stream_server_port = \"0\"\n")],
    ),
    ("version 1 of something else", &[("", "root = \"/var/lib/containerd\"\n")]),
    (
        "version 1 with its old default",
        &[(
            "",
            "[plugins.cri.containerd]\n  default_runtime_name = \"nvidia\"\n  [plugins.cri.containerd.runtimes.runc]\n    runtime_type = \
             \"io.containerd.runtime.v1.linux\"\n",
        )],
    ),
    ("version 2", &[("", include_str!("v2.toml"))]),
    ("version 2, only its number", &[("", "version = 2\n")]),
    ("version 2 with the runtime", &[("", include_str!("v2-nvidia.toml"))]),
    ("version 2 with registries", &[("", include_str!("v2-registry.toml"))]),
    (
        "version 2 without runtimes",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"p:1\"\n",
        )],
    ),
    (
        "version 2, crun alone",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun]\n  runtime_type = \"io.containerd.runc.v2\"\n  \
             pod_annotations = [\"run.oci.handler\"]\n  [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun.options]\n    BinaryName = \
             \"/usr/bin/crun\"\n",
        )],
    ),
    (
        "version 2, another default",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  default_runtime_name = \"kata\"\n  \
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata]\n    runtime_type = \"io.containerd.kata.v2\"\n    \
             privileged_without_host_devices = true\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata.options]\n      ConfigPath = \
             \"/k.toml\"\n",
        )],
    ),
    (
        "version 2, a default that is not there",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  default_runtime_name = \"gone\"\n",
        )],
    ),
    (
        "version 2, another of NVIDIA's is the default",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  default_runtime_name = \"nvidia-cdi\"\n  \
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia-cdi]\n    runtime_type = \"io.containerd.runc.v2\"\n    snapshotter = \"x\"\n",
        )],
    ),
    (
        "version 2, runc without a kind",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n  SystemdCgroup = true\n",
        )],
    ),
    (
        "version 2, the runtime with options of its own",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia]\n  runtime_type = \"io.containerd.runc.v2\"\n  \
             container_annotations = [\"a/*\"]\n  [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia.options]\n    BinaryName = \"/opt/x\"\n    \
             Root = \"/run/nvidia\"\n",
        )],
    ),
    (
        "version 2, CDI on",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = true\n  cdi_spec_dirs = [\"/x\"]\n",
        )],
    ),
    (
        "version 2, the plugin off",
        &[("", "version = 2\ndisabled_plugins = [\"cri\"]\n")],
    ),
    (
        "version 2, everything that TOML has",
        &[(
            "",
            "version = 2\noom_score = -1\ntitle.sub = 1\nfloat = 1.5e3\nwhen = 1979-05-27T07:32:00Z\nl = [[1, 2], [\"a\"]]\ni = { a = 1, b = { c = \"x\" } }\n\
             s = '''\nmany\nlines'''\n[[stream]]\nname = \"a\"\n[[stream]]\nname = \"b\"\n[plugins.\"io.containerd.grpc.v1.cri\"]\nx.y.z = true\n\
             tables = [{ a = 1 }, { a = 2 }]\nempty = []\n",
        )],
    ),
    ("no version, but sections of version 2", &[("", TABLE_V2)]),
    ("version 3", &[("", include_str!("v3.toml"))]),
    ("version 3, only its number", &[("", "version = 3\n")]),
    (
        "version 4",
        &[(
            "",
            "version = 4\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n[plugins.'io.containerd.cri.v1.runtime']\n  enable_cdi = false\n",
        )],
    ),
    ("version 9", &[("", "version = 9\n")]),
    ("version a text", &[("", "version = \"2\"\n")]),
    ("version with a point", &[("", "version = 2.0\n")]),
    ("version a list", &[("", "version = [2]\n")]),
    ("no TOML", &[("", "version = = 2")]),
    ("half of it", &[("", "version = 2\n[plugins.\"io")]),
    ("keys twice", &[("", "version = 2\nroot = \"/a\"\nroot = \"/b\"\n")]),
    (
        "imports of others",
        &[("", "version = 3\nimports = [\"/etc/containerd/extra/*.toml\"]\n")],
    ),
    (
        "imports that match",
        &[("", "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n")],
    ),
    (
        "imports that match otherwise",
        &[("", "version = 3\nimports = [\"/etc/containerd/*/*.toml\"]\n")],
    ),
    (
        "imports of the file",
        &[("", "version = 3\nimports = [\"/etc/containerd/conf.d/99-nvidia.toml\"]\n")],
    ),
    ("imports, relative", &[("", "version = 3\nimports = [\"conf.d/*.toml\"]\n")]),
    ("imports, none", &[("", "version = 3\nimports = []\n")]),
    (
        "imports over lines",
        &[("", "version = 3\nimports = [\n  \"/a/*.toml\", # a\n  \"/b.toml\",\n]\n")],
    ),
    ("imports a text", &[("", "version = 2\nimports = \"/a/*.toml\"\n")]),
    ("imports of numbers", &[("", "version = 2\nimports = [1]\n")]),
    (
        "a drop-in of others, imported",
        &[
            ("", "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"),
            (
                "/etc/containerd/conf.d/10-mine.toml",
                "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"mine:1\"\n  \
                 [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n    SystemdCgroup = true\n",
            ),
        ],
    ),
    (
        "a drop-in of others, not imported",
        &[
            ("", "version = 2\n"),
            ("/etc/containerd/conf.d/10-mine.toml", "version = 2\noom_score = 1\n"),
        ],
    ),
    (
        "our drop-in with something else",
        &[
            ("", include_str!("v2.toml")),
            (
                "/etc/containerd/conf.d/99-nvidia.toml",
                "version = 2\noom_score = 1\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  max_container_log_line_size = 7\n",
            ),
        ],
    ),
    (
        "our drop-in of an earlier run, imported",
        &[
            ("", "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"),
            (
                "/etc/containerd/conf.d/99-nvidia.toml",
                "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = true\n  [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n    \
                 default_runtime_name = \"nvidia\"\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia]\n      runtime_type = \"x\"\n",
            ),
        ],
    ),
    (
        "our drop-in, no TOML",
        &[
            ("", "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"),
            ("/etc/containerd/conf.d/99-nvidia.toml", "= ="),
        ],
    ),
    ("plugins a list", &[("", "version = 2\nplugins = []\n")]),
    (
        "the section a text",
        &[("", "version = 2\n[plugins]\n\"io.containerd.grpc.v1.cri\" = \"x\"\n")],
    ),
    (
        "containerd a text",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\ncontainerd = \"x\"\n",
        )],
    ),
    (
        "runtimes a list",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nruntimes = []\n",
        )],
    ),
    (
        "runc a text",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes]\nrunc = \"x\"\n",
        )],
    ),
    (
        "the runtime a text",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes]\nnvidia = \"x\"\n",
        )],
    ),
    (
        "options a list",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\noptions = []\n",
        )],
    ),
    (
        "default a number",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = 5\n",
        )],
    ),
    (
        "CDI a text",
        &[(
            "",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = \"yes\"\n",
        )],
    ),
    (
        "inline tables",
        &[(
            "",
            "version = 2\nplugins = { \"io.containerd.grpc.v1.cri\" = { containerd = { runtimes = { runc = { runtime_type = \"io.containerd.runc.v2\" } } } } }\n",
        )],
    ),
];

pub(super) const OF_CRIO: &[Input] = &[
    ("missing", &[]),
    ("empty", &[("", "")]),
    ("crun", &[("", include_str!("crun.conf"))]),
    (
        "runc alone",
        &[(
            "",
            "[crio.runtime.runtimes.runc]\nruntime_path = \"/usr/bin/runc\"\nprivileged_without_host_devices = true\n",
        )],
    ),
    (
        "another default",
        &[(
            "",
            "[crio.runtime]\ndefault_runtime = \"kata\"\n[crio.runtime.runtimes.kata]\nruntime_path = \"/usr/bin/kata\"\nruntime_type = \"vm\"\nruntime_root = \"/run/vc\"\n",
        )],
    ),
    (
        "a default that is not there",
        &[("", "[crio.runtime]\ndefault_runtime = \"gone\"\n")],
    ),
    (
        "ours is the default",
        &[(
            "",
            "[crio.runtime]\ndefault_runtime = \"nvidia\"\n[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/bin/crun\"\nmonitor_cgroup = \"pod\"\n",
        )],
    ),
    (
        "the runtime with options of its own",
        &[(
            "",
            "[crio.runtime.runtimes.nvidia]\nruntime_path = \"/opt/x\"\nruntime_root = \"/run/nvidia\"\nallowed_annotations = [\"a\"]\n",
        )],
    ),
    (
        "a runtime in a drop-in",
        &[
            ("", "# nothing here\n"),
            (
                "/etc/crio/crio.conf.d/10-crio.conf",
                "[crio.runtime]\ndefault_runtime = \"crun\"\n[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/libexec/crio/crun\"\nmonitor_path = \"/usr/libexec/crio/conmon\"\n",
            ),
        ],
    ),
    (
        "our drop-in with something else",
        &[
            ("", ""),
            (
                "/etc/crio/crio.conf.d/99-nvidia.toml",
                "[crio.runtime]\ndefault_runtime = \"nvidia\"\nlog_level = \"debug\"\n",
            ),
        ],
    ),
    ("our drop-in, no TOML", &[("/etc/crio/crio.conf.d/99-nvidia.toml", "[crio")]),
    ("no TOML", &[("", "[crio")]),
    (
        "unknown keys",
        &[(
            "",
            "[crio]\nroot = \"/r\"\n[crio.metrics]\nenable_metrics = true\n[other]\nx = 1\n",
        )],
    ),
    ("crio a text", &[("", "crio = \"x\"\n")]),
    ("runtimes a list", &[("", "[crio.runtime]\nruntimes = []\n")]),
    ("runtimes a text", &[("", "[crio.runtime]\nruntimes = \"x\"\n")]),
    ("crun a text", &[("", "[crio.runtime.runtimes]\ncrun = \"x\"\n")]),
    ("default a number", &[("", "[crio.runtime]\ndefault_runtime = 5\n")]),
    ("a path a number", &[("", "[crio.runtime.runtimes.runc]\nruntime_path = 5\n")]),
];

pub(super) fn tree(own: &str, input: &Input) -> Tree {
    let path = |path: &str| if path.is_empty() { own } else { path }.to_owned();
    input.1.iter().map(|(at, text)| (path(at), (*text).to_owned())).collect()
}

/// The arguments with which every input is tried.
pub(super) const WORDS: &[&str] = &[
    "",
    "--set-as-default --cdi.enabled",
    "--nvidia-runtime-name=gpu --nvidia-runtime-path=/opt/gpu",
];

/// Further arguments with which every input of containerd and CRI-O is tried.
pub(super) const WITH_DROP_INS: &[&str] = &[
    "--drop-in-config=",
    "--drop-in-config=/etc/other.d/gpu.toml --nvidia-set-as-default",
];
