//! Pod lists that are derived from another pod list. They are the same in each run, because random choices are a hash of the
//! pod's name.

use std::collections::BTreeMap;

use divvy_policy::rank;

/// A list of rows, with the names of its columns.
#[derive(Debug, Clone)]
pub(crate) struct RowList {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl RowList {
    /// Parse CSV.
    pub(crate) fn read(text: &[u8]) -> RowList {
        let mut reader = csv::Reader::from_reader(text);
        let columns = reader.headers().expect("a header").iter().map(str::to_owned).collect();
        let row = |row: Result<csv::StringRecord, csv::Error>| row.expect("a row").iter().map(str::to_owned).collect();
        let rows = reader.records().map(row).collect();
        RowList { columns, rows }
    }

    /// Format the list as CSV.
    pub(crate) fn text(&self) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        for row in std::iter::once(&self.columns).chain(&self.rows) {
            writer.write_record(row).expect("memory");
        }
        String::from_utf8(writer.into_inner().expect("memory")).expect("text")
    }

    fn column(&self, name: &str) -> usize {
        self.columns.iter().position(|column| column == name).expect("the column")
    }

    fn number(&self, row: &[String], column: &str) -> u64 {
        row[self.column(column)].parse().expect("a number")
    }

    fn milli(&self, row: &[String]) -> u64 {
        self.number(row, "num_gpu") * self.number(row, "gpu_milli")
    }
}

/// Return a list in which `percent` percent of the pods with GPUs accept only one or two named products. The chance of a
/// product is proportional to the square root of the number of its GPUs, so pods request more GPUs of the scarce products
/// than exist.
pub(crate) fn choosy(nodes: &RowList, pods: &RowList, percent: u64) -> RowList {
    // By product: its number of GPUs, and the GPUs and CPU of the largest node.
    let mut products: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for node in &nodes.rows {
        let (gpus, cpu) = (nodes.number(node, "gpu"), nodes.number(node, "cpu_milli"));
        let there = products.entry(&node[nodes.column("model")]).or_default();
        *there = (there.0 + gpus, there.1.max(gpus), there.2.max(cpu));
    }
    let draw = |gpus: u64, cpu: u64, chance: u64| {
        let fits = || products.iter().filter(|(_, (_, most, cores))| *most >= gpus && *cores >= cpu);
        let total: u64 = fits().map(|(_, (count, ..))| count.isqrt()).sum();
        let mut at = chance % total.max(1);
        fits().find_map(|(name, (count, ..))| match at.checked_sub(count.isqrt()) {
            None => Some(*name),
            Some(rest) => {
                at = rest;
                None
            }
        })
    };
    let mut list = pods.clone();
    if !list.columns.iter().any(|column| column == "gpu_spec") {
        list.columns.push("gpu_spec".to_owned());
        list.rows.iter_mut().for_each(|row| row.push(String::new()));
    }
    let spec = list.column("gpu_spec");
    for row in 0..list.rows.len() {
        let [gpus, cpu] = ["num_gpu", "cpu_milli"].map(|column| list.number(&list.rows[row], column));
        let name = &list.rows[row][list.column("name")];
        let chance = |what: &str| rank(&format!("{name} {what}"));
        let mut named = String::new();
        if gpus > 0 && chance("choosy") % 100 < percent {
            named = draw(gpus, cpu, chance("first")).unwrap_or_default().to_owned();
            if chance("two") % 2 == 0 {
                let second = draw(gpus, cpu, chance("second")).unwrap_or_default();
                if second != named {
                    named = format!("{named}|{second}");
                }
            }
        }
        list.rows[row][spec] = named;
    }
    list
}

/// Return a list in which pods with several GPUs request `percent` percent of the GPU capacity. Such pods are added as copies of
/// existing ones, and other pods are dropped so that the sum of all requests stays the same.
pub(crate) fn large(pods: &RowList, percent: u64) -> RowList {
    let (large, mut others): (Vec<_>, Vec<_>) = pods.rows.iter().cloned().partition(|row| pods.number(row, "num_gpu") > 1);
    let total: u64 = pods.rows.iter().map(|row| pods.milli(row)).sum();
    let name = pods.column("name");
    let mut list = RowList {
        columns: pods.columns.clone(),
        rows: Vec::new(),
    };
    let mut asked = 0;
    for (copy, row) in (0..).flat_map(|copy| large.iter().map(move |row| (copy, row))) {
        if asked * 100 >= total * percent {
            break;
        }
        asked += pods.milli(row);
        let mut row = row.clone();
        if copy > 0 {
            row[name] = format!("{}-copy-{copy}", row[name]);
        }
        list.rows.push(row);
    }
    others.sort_by_key(|row| rank(&row[name]));
    for row in others {
        if asked + pods.milli(&row) <= total {
            asked += pods.milli(&row);
            list.rows.push(row);
        }
    }
    list.rows.sort_by(|a, b| a[name].cmp(&b[name]));
    list
}
