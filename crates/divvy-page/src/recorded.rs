//! The page of the recorded history.

use maud::{Markup, html};

use crate::chart;
use crate::scene::Recorded;
use crate::text::{memory, shown, time};

/// The maximum number of rows in the table, and of points in the chart.
const ROWS: usize = 200;
const POINTS: usize = 600;
/// The maximum number of findings on the page.
const FINDINGS: usize = 100;

pub(crate) fn page(record: &Recorded) -> Markup {
    html! {
        h1 { "History" }
        (section(record))
    }
}

/// Everything about the recorded history, which an event replaces.
pub(crate) fn section(record: &Recorded) -> Markup {
    let points = thinned(&record.points, POINTS);
    let most = record
        .points
        .iter()
        .map(|point| point.total.max(point.allocated))
        .max()
        .unwrap_or(0);
    let allocated: Vec<(u64, u64)> = points.iter().map(|point| (point.at, point.allocated)).collect();
    let total = record.points.last().map(|point| point.total);
    let words = format!("Memory allocated over time: {}", chart::in_words(&allocated, memory));
    html! {
        div.single id="record" {
            p.faint { "From " (shown(&record.file)) }
            section.gpu {
                h2 { "Allocations over time" }
                @if let (Some(first), Some(last)) = (record.points.first(), record.points.last()) {
                    figure.tall {
                        (chart::unbroken(&allocated, most, total, &words))
                        figcaption { (time(first.at)) " to " (time(last.at)) ". Memory allocated, up to " (memory(most)) "; the dashed line is all memory at the end" }
                    }
                    details {
                        summary { "Table" }
                        div.wide tabindex="0" role="region" aria-label="Table: allocations over time" {
                            table {
                                thead { tr { th scope="col" { "Time" } th.number scope="col" { "Allocated" } th.number scope="col" { "Total" } } }
                                tbody { @for point in thinned(&record.points, ROWS).iter().rev() { tr { th scope="row" { (time(point.at)) } td.number { (memory(point.allocated)) } td.number { (memory(point.total)) } } } }
                            }
                        }
                    }
                } @else { p.faint { "The file has no allocations." } }
            }
            section.gpu.trouble[!record.findings.is_empty()] {
                h2 { "Broken promises" }
                @if record.findings.is_empty() { p { "None." } }
                @else {
                    ul { @for finding in record.findings.iter().take(FINDINGS) { li.alarm { "⚠ " (shown(finding)) } } }
                    @if record.findings.len() > FINDINGS { p.note { "And " (record.findings.len() - FINDINGS) " more; `divvy audit` prints all of them." } }
                }
            }
        }
    }
}

/// Return at most `most` of the points, at equal distances, with the first and the last one.
fn thinned<T: Copy>(points: &[T], most: usize) -> Vec<T> {
    let count = points.len().min(most);
    let last = points.len().saturating_sub(1);
    (0..count)
        .filter_map(|at| points.get(at * last / count.saturating_sub(1).max(1)).copied())
        .collect()
}
