//! `divvy cdi transform`: changes the root directory of the paths in a spec.

use std::path::Path;

use anyhow::Context as _;
use divvy_cdi::moved::{MovedSide, move_root};
use divvy_cdi::{ProblemSeverity, Spec, SpecFormat, SpecProblem};

use super::{LARGEST_SPEC, read_bounded, say, standard_input, write_whole};
use crate::cli::cdi::{CdiSide, CdiTransformArgs};
use crate::printer;

/// Read a spec, change the root directory of its paths, and write the result.
pub(super) fn run(args: &CdiTransformArgs) -> anyhow::Result<()> {
    for (flag, path) in [("--from", &args.from), ("--to", &args.to)] {
        anyhow::ensure!(
            path.starts_with('/'),
            "{flag} {path}: write an absolute path, which starts with /"
        );
    }
    let shown = args.input.display();
    let text = if args.input == Path::new("-") {
        standard_input()?
    } else {
        read_bounded(&args.input, LARGEST_SPEC).with_context(|| format!("{shown} cannot be read"))?
    };
    let mut spec = Spec::parse(&text).with_context(|| format!("{shown}"))?;
    let side = match args.relative_to {
        CdiSide::Host => MovedSide::Host,
        CdiSide::Container => MovedSide::Container,
    };
    let changed = move_root(&mut spec, &args.from, &args.to, side);
    let problems = spec.problems();
    let refused = problems.iter().find(|problem| problem.severity == ProblemSeverity::Error);
    anyhow::ensure!(
        refused.is_none(),
        "{shown}: engines would refuse the spec: {}",
        refused.map_or_else(String::new, SpecProblem::to_string)
    );
    if changed == 0 {
        say(&format!(
            "warning: no path of {shown} is below {}, so nothing was changed",
            args.from
        ))?;
    }
    let named = |path: &Path| path.extension().is_some_and(|ending| ending == "json");
    // Keep the input's format, unless the output file's name implies another.
    let is_json = if args.output == Path::new("-") {
        text.trim_start().starts_with('{')
    } else {
        named(&args.output)
    };
    let text = spec.print(if is_json { SpecFormat::Json } else { SpecFormat::Yaml });
    if args.output == Path::new("-") {
        return Ok(printer::print(&text)?);
    }
    let name = args.output.file_name().unwrap_or_default().to_string_lossy();
    anyhow::ensure!(
        divvy_cdi::is_spec_file(&name),
        "--output {}: engines read only files whose names end in .yaml or .json; choose such a name",
        args.output.display()
    );
    write_whole(&args.output, &text, 0o644).with_context(|| format!("{} was not written", args.output.display()))?;
    say(&format!("note: {}: {changed} paths moved", args.output.display()))?;
    Ok(())
}
