//! File tables compared with the kernel's own ways to files on persistent memory: the experiments
//! of "DaxVM: Stressing the Limits of Memory as a File Interface" (MICRO '22).

mod aged;
mod append;
mod http;
mod kernel;
mod large;
mod map;
mod once;
mod read_method;
mod repeat;
mod search;
mod serve;
mod server;
mod source_tree;
mod space;
mod start;
mod sync;

pub use append::DAX_APPEND;
pub use map::DAX_MAP;
pub use once::{DAX_ONCE, DAX_ONCE_AGED};
pub use repeat::DAX_REPEAT;
pub use search::{DAX_SEARCH, DAX_SEARCH_AGED};
pub use serve::DAX_SERVE;
pub use space::DAX_SPACE;
pub use start::DAX_START;
pub use sync::DAX_SYNC;

#[cfg(test)]
mod tests {
    #[test]
    fn the_list_has_an_experiment_for_each_figure() {
        let names = crate::ALL.iter().map(|experiment| experiment.name);
        let names: Vec<&str> = names.filter_map(|name| name.strip_prefix("dax-")).collect();
        let all = "map repeat sync append once once-aged search search-aged serve start space";
        assert_eq!(names.join(" "), all);
    }
}
