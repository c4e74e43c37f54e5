//! Charts as SVG.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use plotters::coord::combinators::BindKeyPoints;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::{Axis, Chart, Record, text};

/// Width and height in pixels of the drawing; the page scales it.
const SIZE: (u32, u32) = (760, 420);

/// Colours that most eyes can distinguish, in print too (Okabe and Ito).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(150, 150, 150),
];

/// Height of a line's name in pixels, and its distance from its neighbours.
const NAME: (i32, i32) = (15, 8);

/// Style rules for dark pages. They are only for separate files, because the rules of an element in
/// a page apply to the whole page.
const DARK: &str = "<style>@media (prefers-color-scheme: dark) { \
                    rect[fill=\"#FFFFFF\"] { fill: #0D1117 } \
                    text[fill=\"#000000\"] { fill: #C9D1D9 } \
                    [stroke=\"#000000\"] { stroke: #8B949E } }</style>\n";

/// Writes the charts of experiments to a folder, such as `data-sizes-throughput.svg`: named after
/// the experiment and the chart's title, up to its colon.
///
/// # Errors
/// If a chart cannot be drawn or a file cannot be written.
pub fn write<'a>(folder: &Path, records: impl Iterator<Item = &'a Record>) -> Result<()> {
    for record in records {
        for chart in &record.outcome.charts {
            let title = chart.title.split(':').next().unwrap_or_default().to_lowercase();
            let name = format!("{} {title}.svg", record.experiment).replace([' ', '/'], "-");
            super::write(&folder.join(name), &file(chart)?)?;
        }
    }
    Ok(())
}

/// A chart as an SVG file, for light and for dark pages.
///
/// # Errors
/// If drawing fails.
fn file(chart: &Chart) -> Result<String> {
    let text = svg(chart)?;
    let (head, rest) = text.split_once(">\n").context("a drawing without a first element")?;
    Ok(format!("{head}>\n{DARK}{rest}\n"))
}

/// A chart as an SVG element, without points that its axes cannot show.
///
/// # Errors
/// If drawing fails.
pub fn svg(chart: &Chart) -> Result<String> {
    let x = range(chart, &chart.x, |point| point.0, false);
    let y = range(chart, &chart.y, |point| point.1, !chart.y.logarithmic);
    let log_scale =
        |range: (f64, f64)| (range.0..range.1).log_scale().with_key_points(powers_and_parts(range));
    match (chart.x.logarithmic, chart.y.logarithmic) {
        (false, false) => draw(chart, x.0..x.1, y.0..y.1),
        (true, false) => draw(chart, log_scale(x), y.0..y.1),
        (false, true) => draw(chart, x.0..x.1, log_scale(y)),
        (true, true) => draw(chart, log_scale(x), log_scale(y)),
    }
}

/// The values in a range at which a logarithmic axis has its lines: 1, 2 and 5 times powers of 10.
/// A short range has finer ones, or its ends.
fn powers_and_parts((low, high): (f64, f64)) -> Vec<f64> {
    let values = |parts: &[f64]| {
        let powers = low.log10().floor() as i32..=high.log10().floor() as i32;
        let of_power = |power| parts.iter().map(move |part| part * 10_f64.powi(power));
        let values = powers.flat_map(of_power).filter(|value| (low..=high).contains(value));
        Some(values.collect::<Vec<f64>>()).filter(|values| values.len() > 1)
    };
    values(&[1.0, 2.0, 5.0])
        .or_else(|| values(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]))
        .unwrap_or_else(|| vec![low, high])
}

/// A value at an axis, without zeros that say nothing.
fn label(value: f64) -> String {
    let number = text::number(value);
    match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => number,
    }
}

/// Whether an axis can show a value.
fn shows(axis: &Axis, value: f64) -> bool {
    value.is_finite() && (!axis.logarithmic || value > 0.0)
}

/// The range of an axis: all values, with some room.
fn range(chart: &Chart, axis: &Axis, of: fn(&(f64, f64)) -> f64, from_zero: bool) -> (f64, f64) {
    let points = chart.lines.iter().flat_map(|line| line.points.iter().map(of));
    let (mut low, mut high) = points
        .filter(|value| shows(axis, *value))
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    if low > high {
        (low, high) = (1.0, 2.0);
    }
    if from_zero {
        low = low.min(0.0);
    }
    if low == high {
        (low, high) =
            if axis.logarithmic { (low / 2.0, high * 2.0) } else { (low - 1.0, high + 1.0) };
    }
    match (axis.logarithmic, from_zero) {
        (true, _) => (low / 1.1, high * 1.1),
        (false, true) => (low, high + (high - low) * 0.05),
        (false, false) => (low, high),
    }
}

fn draw<X, Y>(chart: &Chart, x: X, y: Y) -> Result<String>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let mut canvas = ChartBuilder::on(&area)
            .caption(&chart.title, ("sans-serif", 18))
            .margin(10)
            .margin_right(room_for_names(chart))
            .x_label_area_size(48)
            .y_label_area_size(92)
            .build_cartesian_2d(x, y)
            .map_err(failed)?;
        canvas
            .configure_mesh()
            .x_desc(&chart.x.label)
            .y_desc(&chart.y.label)
            .x_label_formatter(&|value| label(*value))
            .y_label_formatter(&|value| label(*value))
            .light_line_style(TRANSPARENT)
            .label_style(("sans-serif", 15))
            .axis_desc_style(("sans-serif", 16))
            .draw()
            .map_err(failed)?;
        let mut ends = Vec::new();
        for (line, colour) in chart.lines.iter().zip(COLOURS.iter().cycle()) {
            let visible =
                |point: &&(f64, f64)| shows(&chart.x, point.0) && shows(&chart.y, point.1);
            let points: Vec<(f64, f64)> = line.points.iter().filter(visible).copied().collect();
            let series = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
            canvas.draw_series(series.point_size(3)).map_err(failed)?;
            if let Some(last) = points.last() {
                ends.push((canvas.backend_coord(last), &line.name, colour));
            }
        }
        for ((x, y), name, colour) in spread(ends) {
            let style = ("sans-serif", 16).into_font().color(colour);
            let place = (x + NAME.1, y - NAME.0 / 2);
            area.draw(&Text::new(name.clone(), place, style)).map_err(failed)?;
        }
        area.present().map_err(failed)?;
    }
    Ok(text)
}

/// Pixels for the longest name to the right of the lines.
fn room_for_names(chart: &Chart) -> i32 {
    let longest = chart.lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
    NAME.1 * 2 + 8 * longest.min(30) as i32
}

/// Names at the ends of lines, moved up or down so that none covers another.
fn spread<T>(mut ends: Vec<((i32, i32), T, &RGBColor)>) -> Vec<((i32, i32), T, &RGBColor)> {
    ends.sort_by_key(|((_, y), ..)| *y);
    // From the bottom up, because there is room above.
    let mut lowest = SIZE.1 as i32 - 4 * NAME.0;
    for ((_, y), ..) in ends.iter_mut().rev() {
        *y = (*y).min(lowest);
        lowest = *y - NAME.0;
    }
    ends
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logarithmic_axis_has_lines_at_round_values() {
        assert_eq!(powers_and_parts((0.45, 11.0)), [0.5, 1.0, 2.0, 5.0, 10.0]);
        assert_eq!(powers_and_parts((280.0, 450.0)), [300.0, 400.0]);
        assert_eq!(powers_and_parts((310.0, 330.0)), [310.0, 330.0]);
        assert_eq!([0.5, 1.0, 10.0, 200_000.0].map(label), ["0.5", "1", "10", "200,000"]);
    }

    #[test]
    fn no_name_covers_another() {
        let ends = [100, 104, 250, 101, 415].map(|y| ((700, y), y, &COLOURS[0]));
        let spread: Vec<i32> = spread(ends.to_vec()).iter().map(|((_, y), ..)| *y).collect();
        assert!(spread.windows(2).all(|pair| pair[1] - pair[0] >= NAME.0), "{spread:?}");
        assert_eq!(spread[3..], [250, 360]);
    }
}
