/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An exmap: a surface, which is a tree with one mount; a pool of frames; and interfaces. An
 * interface is for one thread at a time and has a lane of the pool.
 *
 *	device.c	the device: open, ioctl, and access rights
 *	surface.c	mapping the surface and the vectors, faults
 *	tables.c	the surface's page tables, shown to the process
 *	alloc.c, free.c	frames come to the surface and leave it
 *	flush.c		no CPU and no device reaches a frame that has left
 *	transfer.c	reading and writing pages
 *	harvest.c	which pages were accessed and written
 *	huge.c		pages that a leaf of 2 MiB maps
 *	move.c		frames go from page to page
 *	resize.c	the pool grows and shrinks; charges for it, and for page tables
 *	prune.c		empty page tables are freed
 *	vector.c	commands as vectors
 *	proxy.c		commands as pread, preadv, pwrite and pwritev
 *	uring.c		commands through io_uring
 *	registry.c	the list of all exmaps
 *	check.c		self-check in debugfs
 *	published.c	the interface of the published module
 */
#ifndef VELLUM_EXMAP_H
#define VELLUM_EXMAP_H

#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/llist.h>
#include <linux/mutex.h>
#include <linux/sched/signal.h>
#include <linux/types.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <vellum/exmap.h>

#include "core/compat.h"
#include "core/frames.h"
#include "core/pt_flush.h"
#include "core/pt_huge.h"
#include "core/pt_mount.h"
#include "core/pt_tree.h"

/* Pages that a command acts on. */
struct exmap_range {
	u64		page;
	unsigned int	count;
};

/* The outcome of a command for a range. */
struct exmap_result {
	int		error;
	unsigned int	pages;		/* that the command was carried out for */
};

/* 2 MiB that were taken off and wait for the flush. */
struct exmap_extent {
	u64	page, frame;
};

/* The number of extents that may wait for the same flush. */
#define EXMAP_EXTENTS	16

struct exmap_interface {
	struct mutex	lock;		/* held to carry out a vector; protects all below */
	u64		*vector;	/* a page that the process maps */
	struct exmap_range *ranges;	/* the vector's entries, as read */
	struct exmap_result *results;	/* the outcome of each range */
	pteval_t	**leaving;	/* entries that wait for the flush */
	struct exmap_extent extents[EXMAP_EXTENTS];
	struct llist_head finished;	/* asynchronous calls to be concluded; needs no lock */
	struct work_struct concluding;	/* concludes them */
	struct exmap_transfer_batch *batch;	/* for the next transfers, or NULL */
	bool		published;	/* the vector reports errors as the published module does */
	u64		conflicts, busy, flushes, read, written;
} ____cacheline_aligned_in_smp;

struct exmap {
	struct list_head	node;	/* in the list of all exmaps */
	struct kref		references;
	struct mutex		setup;	/* creation and mapping, one at a time */
	/*
	 * Protects the pool's size. `setup` cannot, as it is taken with the mmap lock held. A
	 * thread that holds `sizing` waits for an interface's lock, and the holder of that lock may
	 * wait for a file's lock.
	 */
	struct mutex		sizing;

	/* Set by creation, which is complete when there are interfaces; unchanged afterwards. */
	u64			flags;
	unsigned int		interfaces;
	struct exmap_interface	*interface;
	struct frame_pool	pool;
	struct user_struct	*user;		/* is charged; or NULL */
	u64			charged;	/* pages; without those of page tables */
	/* The user's limit for page tables in pages, whichever thread brings them. */
	u64			lock_limit;
	struct file		*backing;	/* or NULL */
	/*
	 * For the rest of transfers that no caller waits for. Its work waits for interfaces of this
	 * exmap, and must not delay the work of another exmap.
	 */
	struct workqueue_struct	*work;		/* if there is a backing */

	atomic64_t		read_quickly;	/* pages read without an interface's lock */

	/* Set when the surface is first mapped; then unchanged, except by the core. */
	bool			pinnable;
	pteval_t		leaf_flags;
	pteval_t		zero_leaf;	/* shows a page of zeros; 0: there is none */
	struct page		*zeros;
	atomic_t		over_zeros;	/* commands, see EXMAP_ZEROS_COUNTED */
	struct pt_source	source;		/* of the tree: charges for its tables */
	struct pt_tree		tree;
	struct pt_mount		mount;

	bool			shows_tables;	/* has, or had, a mapping of its tables */
	long			prune_at;	/* beyond this many tables a command prunes */
	/* After the last prune: the number of tables, and of frames taken off by then. */
	long			pruned_tables;
	u64			pruned_given;
	/*
	 * Readers walk the tree without an interface's lock and without the mmap lock. The writer
	 * prunes. Taken before the mmap lock.
	 */
	struct rw_semaphore	walking;
	/* The first page whose leaf is mirrored or shown elsewhere than in the tree. */
	u64			watched;
	/* What unprivileged programs see of the tables; see tables.c. */
	bool			shows;		/* there is such a mapping, or was one */
	struct xarray		shown;		/* by page number / 512 */
};

/* The object of a descriptor. A descriptor that becomes a clone keeps its own exmap. */
struct exmap_handle {
	struct exmap	*exmap;
	struct exmap	*own;
};

/* The flags of creation that this module knows. */
#define EXMAP_FLAGS \
	(VELLUM_EXMAP_PINNABLE | VELLUM_EXMAP_READS_ZEROS | VELLUM_EXMAP_STEALING | \
	 VELLUM_EXMAP_TRACKS | VELLUM_EXMAP_SHRINKS | VELLUM_EXMAP_NO_POOL | \
	 VELLUM_EXMAP_FLUSH_EACH | VELLUM_EXMAP_LOCK_TABLES | \
	 (PT_HUGE_IS_POSSIBLE ? VELLUM_EXMAP_HUGE : 0))

static inline struct exmap *exmap_of(struct file *file)
{
	struct exmap_handle *handle = file->private_data;

	/* Pairs with the cmpxchg() in exmap_become_clone(). */
	return smp_load_acquire(&handle->exmap);
}

/* Whether the exmap has its pool and its interfaces. */
static inline bool exmap_is_created(struct exmap *exmap)
{
	/* Pairs with the release in exmap_create_locked(). */
	return smp_load_acquire(&exmap->interface);
}

/* Returns 0 if there is a surface and the caller may change it. */
static inline int exmap_may_command(struct exmap *exmap)
{
	struct mm_struct *mm = READ_ONCE(exmap->mount.mm);

	if (unlikely(!exmap_is_created(exmap) || !mm))
		return -ENODEV;
	return likely(mm == current->mm) ? 0 : -EPERM;
}

/* Returns the interface if the caller may change the surface; or an error. */
static inline struct exmap_interface *exmap_find_interface(struct exmap *exmap, unsigned int index)
{
	int error = exmap_may_command(exmap);

	if (unlikely(error))
		return ERR_PTR(error);
	return likely(index < exmap->interfaces) ? &exmap->interface[index] : ERR_PTR(-EINVAL);
}

int exmap_create(struct exmap *exmap, const struct vellum_exmap_create *create);
void exmap_put(struct exmap *exmap);
int exmap_become_clone(struct file *file, struct file *other);

int exmap_map_surface(struct exmap *exmap, struct vm_area_struct *vma);
int exmap_map_tables(struct exmap *exmap, struct vm_area_struct *vma);
void __exmap_leaf_changed(struct exmap *exmap, u64 page);
void exmap_tables_destroy(struct exmap *exmap);
int exmap_map_vector(struct exmap *exmap, struct vm_area_struct *vma, unsigned long index);
void exmap_surface_destroy(struct exmap *exmap);

/* exmap_lock_interface(), after a look for empty page tables. */
int exmap_lock_slowly(struct exmap *exmap, struct exmap_interface *interface, bool may_wait);
long exmap_vector(struct exmap *exmap, unsigned int command, unsigned int index,
		  unsigned int entries, bool published);
/*
 * Finds the pages at an address. EINVAL the address is not the surface's; EFAULT the surface ends
 * before.
 */
int exmap_find_range(const struct exmap *exmap, unsigned long address, size_t length,
		     struct exmap_range *range);

/* The caller holds the interface's lock. The ranges, or the page, are within the surface. */
struct exmap_result exmap_alloc_page(struct exmap *exmap, unsigned int index, u64 page);
void exmap_alloc(struct exmap *exmap, unsigned int index, const struct exmap_range *ranges,
		 struct exmap_result *results, unsigned int count);
void exmap_free(struct exmap *exmap, unsigned int index, const struct exmap_range *ranges,
		struct exmap_result *results, unsigned int count);
long exmap_alloc_vector(struct exmap *exmap, unsigned int index, unsigned int entries);
long exmap_free_vector(struct exmap *exmap, unsigned int index, unsigned int entries);
/* Stands for a frame that something holds. */
#define EXMAP_HELD	U64_MAX
u64 exmap_take_off_noted(struct exmap *exmap, pteval_t *leaf, u64 page, bool pins, pteval_t *noted);

/* The kernel's own bound: beyond so many pages a flush drops all translations. */
#define EXMAP_FLUSH_PAGES	33

/*
 * Flush translations of the pages from first to last; of 2 MiB; of all pages; of one page. `mm` is
 * the process that gave the command. May sleep.
 */
void exmap_flush(struct exmap *exmap, struct mm_struct *mm, u64 first, u64 last);
void exmap_flush_extent(struct exmap *exmap, struct mm_struct *mm, u64 page);
void exmap_flush_all(struct exmap *exmap, struct mm_struct *mm);

static inline void exmap_flush_page(struct exmap *exmap, struct mm_struct *mm, u64 page)
{
	unsigned long addr = READ_ONCE(exmap->mount.start) + (page << PAGE_SHIFT);

	pt_flush_range(mm, addr, addr + PAGE_SIZE);
	pt_mount_tell(&exmap->mount, mm, page, 1);
}

/*
 * What a command has still to do for pages that showed zeros, as CPUs may cache that they do.
 *
 * A command that puts a frame over zeros flushes before it returns. Another command may find the
 * frame before that, and must not return before that either. So the first one counts from before it
 * changes the entry until it has flushed. The other one reads the count after the entry. Unless it
 * is 0, the other one flushes, too. It does not wait, as the first one may stand still.
 */
#define EXMAP_ZEROS_STALE	1U	/* flush before the command returns */
#define EXMAP_ZEROS_COUNTED	2U	/* the command is in the exmap's over_zeros */

void exmap_flush_zeros(struct exmap *exmap, struct exmap_interface *interface,
		       struct mm_struct *mm, unsigned int zeros);

/* To be called before a frame is put over zeros. */
static __always_inline void exmap_count_zeros(struct exmap *exmap, unsigned int *zeros)
{
	if (*zeros & EXMAP_ZEROS_COUNTED)
		return;
	*zeros |= EXMAP_ZEROS_COUNTED | EXMAP_ZEROS_STALE;
	atomic_inc(&exmap->over_zeros);
	smp_mb__after_atomic(); /* counted before the entry changes */
}

/* To be called after a command has read an entry that has a frame, and leaves it there. */
static __always_inline void exmap_found(struct exmap *exmap, unsigned int *zeros)
{
	smp_rmb(); /* the entry is read before the count; see exmap_count_zeros() */
	if (unlikely(atomic_read(&exmap->over_zeros)))
		*zeros |= EXMAP_ZEROS_STALE;
}

bool exmap_huge_is_right(const struct vellum_exmap_create *create);
unsigned int exmap_alloc_huge(struct exmap *exmap, unsigned int index, u64 page, bool *is_there);
pteval_t *exmap_make_leaf(struct exmap *exmap, u64 page, bool *is_huge);
pteval_t *exmap_reach(struct exmap *exmap, u64 page);
pteval_t exmap_wait_for_split(pteval_t *leaf);
bool exmap_wait(struct exmap *exmap, pteval_t *leaf, u64 page);
u64 exmap_frame(struct exmap *exmap, u64 page);
bool exmap_may_be_huge(struct exmap *exmap, u64 page);

long exmap_harvest(struct exmap *exmap, const struct vellum_exmap_harvest *harvest);
long exmap_move(struct exmap *exmap, const struct vellum_exmap_move *move);
long exmap_resize(struct exmap *exmap, u64 frames);
int exmap_make_pool(struct exmap *exmap, const struct vellum_exmap_create *create);
void exmap_uncharge(struct exmap *exmap, u64 pages);
/* The number of pages that may still be charged for tables. */
u64 exmap_chargeable(struct exmap *exmap);
/*
 * A page of zeros that is charged like a page table; NULL: there is no memory, or no room in the
 * limit.
 */
u64 *exmap_alloc_charged(struct exmap *exmap);
void exmap_free_charged(struct exmap *exmap, u64 *page);
/*
 * Makes the caller the exmap's user if it has none. The tree's tables are charged from now on, up
 * to the caller's limit.
 */
void exmap_charge_tables(struct exmap *exmap);

/* There are more tables than the mark: frees empty ones. EINTR; EAGAIN. */
int exmap_prune(struct exmap *exmap, bool may_wait);
void exmap_set_prune_mark(struct exmap *exmap);
int exmap_shrinker_init(void);
void exmap_shrinker_exit(void);

ssize_t exmap_read_iter(struct kiocb *kiocb, struct iov_iter *iter);
ssize_t exmap_write_iter(struct kiocb *kiocb, struct iov_iter *iter);
void exmap_conclude(struct work_struct *work);

int exmap_uring_cmd(struct io_uring_cmd *command, unsigned int issue_flags);

/*
 * Call the function for all exmaps, until it returns false. No registered exmap ends meanwhile. The
 * second returns false if another thread holds the list.
 */
void exmap_each(bool (*visit)(struct exmap *exmap, void *data), void *data);
bool exmap_try_each(bool (*visit)(struct exmap *exmap, void *data), void *data);
void exmap_register(struct exmap *exmap);
void exmap_unregister(struct exmap *exmap);

void exmap_check_init(struct dentry *folder);

static inline bool exmap_published_knows(unsigned int command)
{
	return _IOC_TYPE(command) == 'k';
}

long exmap_published_ioctl(struct exmap *exmap, struct file *file, unsigned int command,
			   unsigned long argument);

extern const struct file_operations exmap_operations;

/* For the last step of exmaps that end in work of their own queue. */
extern struct workqueue_struct *exmap_work;

int exmap_init(struct dentry *folder);
void exmap_exit(void);

/* EINTR: the caller is to die. EAGAIN: the caller may not wait, and would have to. */
static inline int exmap_lock_interface(struct exmap *exmap, struct exmap_interface *interface,
				       bool may_wait)
{
	if (unlikely(atomic_long_read(&exmap->tree.tables) > READ_ONCE(exmap->prune_at)))
		return exmap_lock_slowly(exmap, interface, may_wait);
	if (unlikely(!may_wait))
		return mutex_trylock(&interface->lock) ? 0 : -EAGAIN;
	return mutex_lock_killable(&interface->lock) ? -EINTR : 0;
}

/* Stands for the first page of a range that is not within the surface. */
#define EXMAP_OUTSIDE	U64_MAX

/* Decodes an entry of a vector. A range that is not within the surface becomes an empty one. */
static __always_inline struct exmap_range exmap_decode(const struct exmap *exmap, u64 entry)
{
	struct exmap_range range = { entry & ((1ULL << 52) - 1), entry >> 52 };

	/* The sum has 53 bits at most. */
	if (unlikely(!range.count || range.page + range.count > exmap->tree.pages))
		range = (struct exmap_range){ range.count ? EXMAP_OUTSIDE : 0, 0 };
	return range;
}

/* Encodes the outcome as the process reads it, and counts the entries with an error. */
static __always_inline u64 exmap_encode(const struct exmap_interface *interface,
					struct exmap_range range, struct exmap_result result,
					long *failed)
{
	if (unlikely(!range.count)) {
		if (!interface->published)
			result.error = -EINVAL;
		else if (range.page == EXMAP_OUTSIDE)
			result.error = -EFAULT;
	}
	*failed += result.error != 0;
	return (u32)result.error | (u64)result.pages << 32;
}

static __always_inline bool exmap_has_frame(const struct exmap *exmap, pteval_t leaf)
{
	return (leaf & _PAGE_PRESENT) && leaf != exmap->zero_leaf;
}

/*
 * Whether a page that something holds must stay on the surface (EBUSY): the process has asked for
 * that, or transfers hold pages. In any case the pool looks for references before it reuses a
 * frame.
 */
static __always_inline bool exmap_may_be_pinned(const struct exmap *exmap)
{
	return exmap->pinnable || atomic_read(&exmap->pool.holders);
}

/*
 * The state of an entry after its frame was taken off and before TLBs are flushed. No thread may
 * put a frame there before, as a CPU could still send that thread to the old one. For the core and
 * the CPU the entry is none. pt_huge.h has two more such states.
 */
#define EXMAP_LEAVING	_PAGE_ACCESSED

/* Whether the range begins with a whole extent of 2 MiB, and the pool has blocks. */
static __always_inline bool exmap_is_extent(const struct exmap *exmap, struct exmap_range range)
{
	return unlikely(exmap->pool.blocks) && !(range.page % PT_ENTRIES) &&
	       range.count >= PT_ENTRIES;
}

/* The next page's leaf: the one after this leaf, or NULL where another table begins. */
static __always_inline pteval_t *exmap_next_leaf(pteval_t *leaf, u64 page)
{
	return leaf && (page & (PT_ENTRIES - 1)) ? leaf + 1 : NULL;
}

/* The number of pages up to where the next table's pages begin, or `count`. */
static inline unsigned int exmap_rest_of_table(u64 page, unsigned int count)
{
	return min_t(u64, count, PT_ENTRIES - page % PT_ENTRIES);
}

/*
 * Lets other threads run where a table's pages begin, as a range may be long. False: the caller is
 * to die.
 */
static inline bool exmap_may_go_on(u64 page)
{
	if (page % PT_ENTRIES)
		return true;
	cond_resched();
	return !fatal_signal_pending(current);
}

/*
 * For comparison: takes the lock of the table, which is needed only to take frames off. NULL
 * otherwise.
 */
static __always_inline spinlock_t *exmap_lock_table(const struct exmap *exmap, pteval_t *leaf)
{
	spinlock_t *lock = NULL;

	if (unlikely(exmap->flags & VELLUM_EXMAP_LOCK_TABLES)) {
		lock = pt_table_lock(leaf);
		spin_lock(lock);
		__release(lock); /* sparse cannot know when the lock is held */
	}
	return lock;
}

static __always_inline void exmap_unlock_table(spinlock_t *lock)
{
	if (unlikely(lock)) {
		__acquire(lock);
		spin_unlock(lock);
	}
}

/* To be called after a leaf changed, and before TLBs are flushed. */
static __always_inline void exmap_leaf_changed(struct exmap *exmap, u64 page)
{
	if (unlikely(page >= exmap->watched))
		__exmap_leaf_changed(exmap, page);
}

/*
 * Puts a frame on a page, with what is noted of it. False: the page has one, or another thread has
 * claimed the entry.
 */
static __always_inline bool exmap_place_noted(struct exmap *exmap, pteval_t *leaf, u64 page,
					      u64 frame, pteval_t noted, unsigned int *zeros)
{
	spinlock_t *lock = exmap_lock_table(exmap, leaf);
	pteval_t old = READ_ONCE(*leaf);
	bool placed = false;

	while ((!old || old == exmap->zero_leaf) && !placed) {
		if (unlikely(old))
			exmap_count_zeros(exmap, zeros);
		placed = try_cmpxchg(leaf, &old, frame << PAGE_SHIFT | exmap->leaf_flags | noted);
	}
	exmap_unlock_table(lock);
	if (placed)
		exmap_leaf_changed(exmap, page);
	return placed;
}

/* Puts a frame on a page that was neither accessed nor written since. */
static __always_inline bool exmap_place(struct exmap *exmap, pteval_t *leaf, u64 page, u64 frame,
					unsigned int *zeros)
{
	return exmap_place_noted(exmap, leaf, page, frame, 0, zeros);
}

#endif /* VELLUM_EXMAP_H */
