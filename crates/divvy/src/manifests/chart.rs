//! A chart's files. Divvy's own are part of the program, so that it installs itself with nothing beside it.

use serde_json::{Value, json};

use super::Error;

/// A chart, read.
#[derive(Debug, Clone)]
pub struct Chart {
    name: String,
    app_version: String,
    version: String,
    values: Value,
    schema: Value,
    templates: Vec<(&'static str, &'static str)>,
}

macro_rules! file {
    ($($name:literal),+) => {
        include_str!(concat!("../../../../deploy/helm/divvy/", $($name),+))
    };
}
macro_rules! templates {
    ($($name:literal),* $(,)?) => {
        vec![$((concat!("templates/", $name), file!("templates/", $name))),*]
    };
}

/// The chart's values.yaml, with its comments.
pub const VALUES: &str = file!("values.yaml");

impl Chart {
    /// Divvy's chart. Templates are in the order of their names, as Helm has them.
    ///
    /// # Errors
    /// A file of it is broken; the tests look that none is.
    pub fn embedded() -> Result<Chart, Error> {
        Chart::new(
            file!("Chart.yaml"),
            VALUES,
            file!("values.schema.json"),
            templates![
                "NOTES.txt",
                "_helpers.tpl",
                "agent.yaml",
                "explainer.yaml",
                "extender.yaml",
                "policies.yaml",
                "probe.yaml",
                "rbac.yaml",
                "runtimeclass.yaml",
                "serviceaccounts.yaml",
            ],
        )
    }

    pub(super) fn new(
        about: &str,
        values: &str,
        schema: &str,
        templates: Vec<(&'static str, &'static str)>,
    ) -> Result<Chart, Error> {
        let yaml = |file: &str, text: &str| -> Result<Value, Error> {
            serde_saphyr::from_str(text).map_err(|error| Error::Chart(format!("{file}: {error}")))
        };
        let about = yaml("Chart.yaml", about)?;
        let field = |name: &str| match about.get(name) {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => Err(Error::Chart(format!("Chart.yaml has no {name}"))),
        };
        Ok(Chart {
            name: field("name")?,
            app_version: field("appVersion")?,
            version: field("version")?,
            values: yaml("values.yaml", values)?,
            schema: serde_json::from_str(schema).map_err(|error| Error::Chart(format!("values.schema.json: {error}")))?,
            templates,
        })
    }

    /// `name` of Chart.yaml.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The values when nothing is chosen.
    pub fn values(&self) -> &Value {
        &self.values
    }

    /// JSON Schema of the values.
    pub fn schema(&self) -> &Value {
        &self.schema
    }

    /// Names in the chart, and texts.
    pub fn templates(&self) -> &[(&'static str, &'static str)] {
        &self.templates
    }

    /// What templates know as `.Chart`.
    pub(super) fn about(&self) -> Value {
        json!({"Name": self.name, "AppVersion": self.app_version, "Version": self.version})
    }
}
