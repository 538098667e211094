//! A container is to be created.

use std::path::Path;

use divvy_container::runtime::bundle::Bundle;
use divvy_container::runtime::call::Call;
use divvy_container::runtime::plan::{self, Asked, Plan};
use divvy_container::runtime::settings::Settings;

use crate::error::{Error, say};
use crate::files;

/// Puts into its configuration what the container is to have. One that asks for nothing stays as it is, to the byte.
pub(crate) fn prepare(call: &Call, settings: &Settings) -> Result<(), Error> {
    let path = Path::new(call.bundle.as_deref().unwrap_or(".".as_ref())).join("config.json");
    let file = |what| {
        let path = path.clone();
        move |source| Error::File { what, path, source }
    };
    let of_bundle = |source| Error::Bundle {
        path: path.clone(),
        source,
    };
    let text = files::read(&path).map_err(file("read"))?;
    let mut bundle = Bundle::parse(&text).map_err(of_bundle)?;
    let asked = Asked::of(&bundle.container().map_err(of_bundle)?, settings)?;
    for sentence in &asked.ignored {
        say(Some(call), "warning", sentence);
    }
    if asked.leaves_alone() {
        return Ok(());
    }
    let registry = files::specs(&settings.spec_dirs)?;
    let plan = asked.plan(&registry)?;
    if plan == Plan::LeaveAlone {
        return Ok(());
    }
    let edits = plan::edits(&plan, &registry)?;
    bundle.remove_legacy_hooks().map_err(of_bundle)?;
    bundle.apply(&edits, files::device).map_err(of_bundle)?;
    files::replace(&path, &bundle.text()).map_err(file("written"))
}
