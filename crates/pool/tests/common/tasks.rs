//! A `block_on`, and a small executor of many tasks on a few threads.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use super::PATIENCE;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future on this thread until it is ready; fails if no thread wakes it.
#[track_caller]
pub fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let left = deadline.checked_duration_since(Instant::now());
        thread::park_timeout(left.expect("the task was not woken in time"));
    }
}

/// Polls a future once, with a waker that counts.
pub fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>, wakes: &Arc<Wakes>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(&Waker::from(wakes.clone())))
}

/// Counts how often a task was woken.
#[derive(Debug, Default)]
pub struct Wakes(AtomicU64);

impl Wakes {
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

type BoxedTask = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Task {
    future: Mutex<Option<BoxedTask>>,
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    ready: VecDeque<Arc<Task>>,
    unfinished: usize,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let queue = self.queue.clone();
        queue.state.lock().unwrap().ready.push_back(self);
        queue.changed.notify_one();
    }
}

/// Runs all tasks to their end on `threads` threads; fails if all of them wait.
pub fn run_all(threads: usize, tasks: Vec<BoxedTask>) {
    let queue = Arc::new(Queue::default());
    queue.state.lock().unwrap().unfinished = tasks.len();
    for future in tasks {
        Arc::new(Task { future: Mutex::new(Some(future)), queue: queue.clone() }).wake();
    }
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| work(&queue));
        }
    });
}

fn work(queue: &Queue) {
    loop {
        let mut state = queue.state.lock().unwrap();
        let task = loop {
            if state.unfinished == 0 {
                return;
            }
            if let Some(task) = state.ready.pop_front() {
                break task;
            }
            let (next, timeout) = queue.changed.wait_timeout(state, PATIENCE).unwrap();
            assert!(!timeout.timed_out(), "{} tasks sleep for ever", next.unfinished);
            state = next;
        };
        drop(state);
        // A thread holds this while it polls the task. If the task is woken meanwhile, the next
        // thread waits here.
        let mut future = task.future.lock().unwrap();
        let waker = Waker::from(task.clone());
        let Some(running) = future.as_mut() else { continue };
        if running.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            *future = None;
            queue.state.lock().unwrap().unfinished -= 1;
            queue.changed.notify_all();
        }
    }
}
