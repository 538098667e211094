use super::Series;
use super::svg::{Axis, BOTTOM, Drawing, LEFT, RIGHT, TOP, colour, number, step};

/// A bar chart with groups of bars.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// The title above the plot.
    pub title: String,
    /// The label of the vertical axis.
    pub up: String,
    /// The names of the groups, two lines each.
    pub groups: Vec<(String, String)>,
    /// The height of the bar in each group, for each series.
    pub series: Vec<Series<Vec<f64>>>,
}

impl Bars {
    /// Return the chart as SVG.
    pub fn svg(&self) -> String {
        let mut drawing = Drawing::new(&self.title);
        drawing.legend(self.series.iter().map(|one| (one.name.as_str(), one.colour)), true);
        let most = self
            .series
            .iter()
            .flat_map(|one| one.values.iter().copied())
            .fold(0.0, f64::max);
        let most = if most > 0.0 { most } else { 1.0 };
        let round = step(most / 8.0);
        let up = Axis {
            least: 0.0,
            most: (most / round - 1e-9).ceil() * round,
            from: BOTTOM,
            to: TOP,
        };
        drawing.vertical(&up, &self.up);
        let room = (RIGHT - LEFT) / self.groups.len().max(1) as f64;
        let wide = 0.8 * room / self.series.len().max(1) as f64;
        for (group, (first, second)) in self.groups.iter().enumerate() {
            let x = LEFT + (group as f64 + 0.5) * room;
            drawing.text(x, BOTTOM + 19.0, "middle", 12, first);
            drawing.text(x, BOTTOM + 36.0, "middle", 11, second);
            for (place, one) in self.series.iter().enumerate() {
                let Some(height) = one.values.get(group) else { continue };
                let top = up.at(*height);
                drawing.put(&format!(
                    "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>{}: {} %</title></rect>",
                    number(x - 0.4 * room + place as f64 * wide),
                    number(top),
                    number((wide - 1.0).max(0.5)),
                    number((BOTTOM - top).max(0.0)),
                    colour(one.colour),
                    super::svg::escape(&one.name),
                    number(*height)
                ));
            }
        }
        drawing.finish()
    }
}
