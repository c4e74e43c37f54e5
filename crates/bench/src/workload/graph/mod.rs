//! Graphs with cycles, stored as pages that refer to each other, and the breadth-first search.
//!
//! Graphs of pages, which pointer swizzling cannot support and hash tables make slow (SIGMOD'23,
//! section 3.1): any page may refer to any other, any number of times, and a reader follows a
//! reference by arithmetic.

pub mod debian;
pub mod pages;
pub mod rmat;

/// A graph in memory: the neighbours of vertex `v` are `targets[starts[v]..starts[v + 1]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graph {
    starts: Vec<usize>,
    targets: Vec<u32>,
}

impl Graph {
    /// The graph of `vertices` vertices with these edges. Equal edges count once.
    ///
    /// # Panics
    /// If an edge is of a vertex that is not there.
    pub fn of_edges(vertices: usize, mut edges: Vec<(u32, u32)>) -> Graph {
        edges.sort_unstable();
        edges.dedup();
        let mut starts = vec![0; vertices + 1];
        for (from, to) in &edges {
            assert!((*to as usize) < vertices, "vertex {to} of {vertices}");
            starts[*from as usize + 1] += 1;
        }
        for vertex in 0..vertices {
            starts[vertex + 1] += starts[vertex];
        }
        Graph { starts, targets: edges.into_iter().map(|(_, to)| to).collect() }
    }

    /// Vertices.
    pub fn vertices(&self) -> usize {
        self.starts.len() - 1
    }

    /// Edges.
    pub fn edges(&self) -> usize {
        self.targets.len()
    }

    /// The targets of a vertex' edges.
    pub fn neighbours(&self, vertex: u32) -> &[u32] {
        let vertex = vertex as usize;
        &self.targets[self.starts[vertex]..self.starts[vertex + 1]]
    }

    /// The vertex with the most edges, a good place to begin.
    pub fn hub(&self) -> u32 {
        let degree = |vertex: &u32| self.neighbours(*vertex).len();
        (0..self.vertices() as u32).max_by_key(degree).unwrap_or(0)
    }

    /// A breadth-first search in memory, whose result all other searches must have.
    pub fn search(&self, root: u32) -> Found {
        let mut seen = vec![false; self.vertices()];
        seen[root as usize] = true;
        let (mut frontier, mut found) = (vec![root], Found::default());
        while !frontier.is_empty() {
            found.level(frontier.len());
            let mut next = Vec::new();
            for vertex in frontier {
                found.edges += self.neighbours(vertex).len() as u64;
                for &target in self.neighbours(vertex) {
                    if !std::mem::replace(&mut seen[target as usize], true) {
                        next.push(target);
                    }
                }
            }
            frontier = next;
        }
        found
    }
}

/// The result of a breadth-first search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Vertices at each distance from the root.
    pub levels: Vec<usize>,
    /// Edges that were followed.
    pub edges: u64,
}

impl Found {
    fn level(&mut self, vertices: usize) {
        self.levels.push(vertices);
    }

    /// Vertices that were reached.
    pub fn vertices(&self) -> usize {
        self.levels.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_goes_level_by_level_and_round_cycles() {
        let graph =
            Graph::of_edges(6, vec![(0, 1), (0, 2), (1, 3), (2, 3), (3, 0), (0, 1), (5, 0)]);
        assert_eq!((graph.vertices(), graph.edges()), (6, 6));
        let found = graph.search(0);
        assert_eq!(found, Found { levels: vec![1, 2, 1], edges: 5 });
        assert_eq!((found.vertices(), graph.hub()), (4, 0));
        assert_eq!(graph.search(4), Found { levels: vec![1], edges: 0 });
    }
}
