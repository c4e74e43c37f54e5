//! The limits of connections, in all and for each user.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// In all.
const MOST: usize = 512;

/// For one user, so that no user locks out the others.
const MOST_OF_ONE: usize = 128;

#[derive(Debug, Default)]
pub(super) struct Admission(Mutex<HashMap<u32, usize>>);

/// A connection's place among all; dropping it frees the place.
#[derive(Debug)]
pub(super) struct Ticket {
    admission: Arc<Admission>,
    uid: u32,
}

impl Admission {
    /// `None`: there are too many already.
    pub(super) fn admit(self: &Arc<Self>, uid: u32) -> Option<Ticket> {
        let mut counts = self.counts();
        let of_one = counts.get(&uid).copied().unwrap_or(0);
        if of_one >= MOST_OF_ONE || counts.values().sum::<usize>() >= MOST {
            return None;
        }
        counts.insert(uid, of_one + 1);
        Some(Ticket { admission: Arc::clone(self), uid })
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut counts = self.admission.counts();
        if let Some(count) = counts.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_all_places() {
        let admission = Arc::new(Admission::default());
        let mut tickets: Vec<Ticket> =
            (0..MOST_OF_ONE).map(|_| admission.admit(1).unwrap()).collect();
        assert!(admission.admit(1).is_none());
        let others = (2..5).flat_map(|uid| (0..MOST_OF_ONE).map(move |_| uid));
        tickets.extend(others.map(|uid| admission.admit(uid).unwrap()));
        assert!(admission.admit(5).is_none());
        tickets.remove(0);
        assert!(admission.admit(5).is_some() && admission.admit(1).is_some());
        drop(tickets);
        assert!(admission.counts().is_empty());
    }
}
