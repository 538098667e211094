//! The configuration that a release of containerd uses, from the files that it reads (`LoadConfig` and `MigrateConfig` in
//! `cmd/containerd/server/config`, and `configMigration` in `plugins/cri/runtime`).

use super::{ContainerdFile, ContainerdRelease, Merge, add, load, section};
use crate::text::Values;
use crate::{Configuration, Error, Ignored, TextFiles};

/// From this release on, containerd accepts an imported file with a higher version than the main file's.
const ANY_ORDER: ContainerdRelease = (2, 3, 5);

/// The keys of `io.containerd.grpc.v1.cri` that containerd 2 reads there in a file of any version.
const OF_SERVER: [&str; 6] = [
    "disable_tcp_service",
    "stream_server_address",
    "stream_server_port",
    "stream_idle_timeout",
    "enable_tls_streaming",
    "x509_key_pair_streaming",
];

/// Return the configuration that this release uses, with the sections that it does not use.
///
/// # Errors
/// Fails with [`Error::Version`] if this release does not start because of the files' versions, and with the errors of [`read`](super::read).
pub fn effective(files: &dyn TextFiles, main: &str, release: ContainerdRelease) -> Result<Configuration, Error> {
    let by_key = if release >= (2, 0, 0) { Merge::Keys } else { Merge::Sections };
    let loaded = load(files, main, by_key)?;
    let last = accepted(&loaded, release)?;
    let mut all = Configuration {
        version: loaded.first().and_then(|file| file.version),
        ..Configuration::default()
    };
    let read: Vec<(&ContainerdFile, Values<'_>)> = loaded
        .iter()
        .map(|file| Ok((file, file.values()?)))
        .collect::<Result<_, Error>>()?;
    for (file, values) in &read {
        all.add_general(file, values)?;
    }
    if release < (2, 0, 0) {
        let right = section(last.min(2));
        for (file, values) in read.iter().filter(|_| last >= 2) {
            if values.table(&["plugins", "cri"])?.is_some() {
                return Err(Error::Version {
                    path: file.path.clone(),
                    version: file.stated,
                    why: format!("containerd 1.x accepts the section plugins.cri in no configuration of version {last}"),
                });
            }
        }
        for (file, values) in &read {
            if values.table(&["plugins", right])?.is_some() {
                all.forget_section();
                add(&mut all, values, &["plugins", right], true)?;
            }
            let others = [1, 2, 3].map(section).into_iter().filter(|other| *other != right);
            ignore(&mut all, file, values, others)?;
        }
        return Ok(all);
    }
    // Each file is converted on its own from containerd 2.3 on; before that, all files together.
    let units: Vec<&[(&ContainerdFile, Values<'_>)]> = if release >= (2, 3, 0) {
        read.chunks(1).collect()
    } else {
        vec![&read]
    };
    for unit in units {
        let mut has_new = false;
        for (_, values) in unit {
            has_new |= values.table(&["plugins", section(3), "containerd", "runtimes"])?.is_some();
        }
        for (file, values) in unit {
            let of_file: &[&str] = if file.stated < 2 {
                &["cri", section(2)]
            } else {
                &[section(2)]
            };
            for old in of_file {
                // The conversion keeps a key of the newer section. `runtimes` is one key.
                let is_used = release >= (2, 3, 0) || last == 2;
                if is_used {
                    add(&mut all, values, &["plugins", old], !has_new)?;
                }
                let has_runtimes = values.table(&["plugins", old, "containerd", "runtimes"])?.is_some();
                if !is_used || (has_new && has_runtimes) {
                    ignore(&mut all, file, values, [*old].into_iter())?;
                }
            }
            if file.stated >= 2 {
                ignore(&mut all, file, values, ["cri"].into_iter())?;
            }
        }
        for (_, values) in unit {
            add(&mut all, values, &["plugins", section(3)], true)?;
        }
    }
    Ok(all)
}

/// Return the version of the merged configuration, which decides what containerd before 2.3 reads.
fn accepted(loaded: &[ContainerdFile], release: ContainerdRelease) -> Result<i64, Error> {
    const NEWEST: [(ContainerdRelease, i64, &str); 3] =
        [((2, 3, 0), 4, "2.3"), ((2, 0, 0), 3, "2.0 to 2.2"), ((1, 7, 0), 2, "1.7")];
    let newest = NEWEST.iter().find(|(from, ..)| release >= *from);
    let refused = |file: &ContainerdFile, why: String| {
        Err(Error::Version {
            path: file.path.clone(),
            version: file.stated,
            why,
        })
    };
    let mut main: Option<&ContainerdFile> = None;
    // containerd 2.0 to 2.2 convert a file without a version to their newest version first.
    let mut last = if release >= (2, 0, 0) { 3 } else { 1 };
    for file in loaded {
        if let Some((_, most, name)) = newest
            && file.stated > *most
        {
            return refused(file, format!("containerd {name} reads versions up to {most}"));
        }
        if let Some(main) = main
            && file.stated > main.stated
            && release >= (2, 3, 0)
            && release < ANY_ORDER
        {
            return refused(
                file,
                format!(
                    "containerd 2.3.0 to 2.3.4 accepts no imported file with a higher version than that of {}, which is {}",
                    main.path, main.stated
                ),
            );
        }
        if file.stated > 0 {
            main = main.or(Some(file));
        }
        if file.stated > 1 || (file.stated == 1 && release < (2, 0, 0)) {
            last = file.stated;
        }
    }
    Ok(last)
}

fn ignore(
    all: &mut Configuration,
    file: &ContainerdFile,
    values: &Values<'_>,
    sections: impl Iterator<Item = &'static str>,
) -> Result<(), Error> {
    for section in sections {
        let table = values.table(&["plugins", section])?;
        if table.is_some_and(|table| table.keys().any(|key| !OF_SERVER.contains(&key.as_str()))) {
            all.ignored.push(Ignored {
                path: file.path.clone(),
                version: file.stated,
                section,
            });
        }
    }
    Ok(())
}
