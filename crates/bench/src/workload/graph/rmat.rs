//! R-MAT graphs (Chakrabarti et al., SDM'04) with the constants of Graph500: few vertices with very
//! many edges, many with few, cycles everywhere.

use super::Graph;
use crate::workload::values::Random;

/// Probabilities of the upper left, upper right and lower left quarter of the matrix.
const A: f64 = 0.57;
const B: f64 = 0.19;
const C: f64 = 0.19;

/// A graph of `2^scale` vertices and, before duplicates go, `factor` edges each.
pub fn generate(scale: u32, factor: usize, seed: u64) -> Graph {
    let vertices = 1usize << scale;
    let mut random = Random::new(seed);
    let edges = (0..vertices * factor).map(|_| edge(scale, &mut random)).collect();
    Graph::of_edges(vertices, edges)
}

fn edge(scale: u32, random: &mut Random) -> (u32, u32) {
    let (mut from, mut to) = (0, 0);
    for _ in 0..scale {
        let draw = random.fraction();
        let (lower, right) = (draw >= A + B, (A..A + B).contains(&draw) || draw >= A + B + C);
        from = from << 1 | u32::from(lower);
        to = to << 1 | u32::from(right);
    }
    (from, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_are_skewed_and_the_same_again() {
        let graph = generate(12, 8, 1);
        assert_eq!(graph, generate(12, 8, 1));
        assert_eq!(graph.vertices(), 4096);
        let hub = graph.neighbours(graph.hub()).len();
        assert!(hub > 20 * graph.edges() / graph.vertices(), "the hub has {hub} edges");
        assert!(graph.search(graph.hub()).vertices() > 1000);
    }
}
