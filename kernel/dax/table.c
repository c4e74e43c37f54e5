// SPDX-License-Identifier: GPL-2.0
/* A file table: its life, and how it is brought up to date. dax.h says what keeps it safe. */

#include <linux/cred.h>
#include <linux/file.h>
#include <linux/libnvdimm.h>
#include <linux/mm.h>
#include <linux/path.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "dax/dax.h"

/* After so many refreshes in vain the file system serves the file. */
#define DAX_ATTEMPTS		8

/* How long the file system serves a mapping the first time; then twice as long, and so on. */
#define DAX_FIRST_PAUSE		(HZ / 100 ?: 1)
#define DAX_LONGEST_PAUSE	(10 * HZ)

static u64 dax_size_in_pages(const struct dax_table *table)
{
	return DIV_ROUND_UP(i_size_read(dax_inode(table)), PAGE_SIZE);
}

static bool dax_has_stale_pages(const struct dax_table *table)
{
	lockdep_assert_held(&table->lock);
	return table->stale_first < table->stale_end;
}

/*
 * A change of the inode's generation exchanges all blocks of two files (EXT4_IOC_SWAP_BOOT), and
 * unmaps nothing.
 */
static bool dax_is_stale(const struct dax_table *table)
{
	return dax_has_stale_pages(table) ||
	       READ_ONCE(dax_inode(table)->i_generation) != table->generation;
}

bool dax_table_is_stale(struct dax_table *table)
{
	bool is_stale;

	spin_lock(&table->lock);
	is_stale = dax_is_stale(table);
	spin_unlock(&table->lock);
	return is_stale;
}

bool dax_table_is_current(struct dax_table *table, u64 end)
{
	bool is_current;

	spin_lock(&table->lock);
	is_current = !dax_is_stale(table) && table->pages >= min(end, dax_size_in_pages(table));
	spin_unlock(&table->lock);
	return is_current;
}

u64 dax_table_unmaps(struct dax_table *table)
{
	u64 unmaps;

	spin_lock(&table->lock);
	unmaps = table->unmaps;
	spin_unlock(&table->lock);
	return unmaps;
}

void dax_table_misses(struct dax_table *table, u64 page)
{
	spin_lock(&table->lock);
	table->misses |= page < table->pages;
	spin_unlock(&table->lock);
}

static void dax_mark_stale(struct dax_table *table, u64 first, u64 end)
{
	lockdep_assert_held(&table->lock);
	end = min(end, table->reach);
	if (first >= end)
		return;
	if (dax_has_stale_pages(table)) {
		first = min(first, table->stale_first);
		end = max(end, table->stale_end);
	}
	table->stale_first = first;
	table->stale_end = end;
	table->notices++;
}

void dax_table_lose(struct dax_table *table, u64 first, u64 end)
{
	spin_lock(&table->lock);
	table->unmaps++;
	dax_mark_stale(table, first, end);
	spin_unlock(&table->lock);
	dax_attachments_lose(table, first, end);
}

/* Life. */

static void dax_table_destroy(struct work_struct *work)
{
	struct dax_table *table = container_of(work, struct dax_table, destruction);

	pt_tree_free_tables(&table->tree);
	dax_blocks_close(table);
	mutex_destroy(&table->syncing);
	mutex_destroy(&table->building);
	kfree(table);
}

static void dax_table_walked(struct rcu_head *head)
{
	struct dax_table *table = container_of(head, struct dax_table, walked);

	queue_work(dax_end_work, &table->destruction);
}

/*
 * The module's threads walk page tables under RCU. A fault may walk a table that was detached from
 * its slot meanwhile, because that takes no lock of the process.
 */
void dax_table_destroy_later(struct dax_table *table)
{
	if (table->was_attached)
		pt_call_after_walks(&table->walked, dax_table_walked);
	else
		call_rcu(&table->walked, dax_table_walked);
}

/* Takes over what a refresh that is to come needs of the file. False: none is to come. */
static bool dax_table_take_return(struct dax_table *table, struct dax_return *taken)
{
	lockdep_assert_held(&table->lock);
	*taken = table->return_to;
	table->return_to = (struct dax_return){};
	return taken->cred;
}

void dax_return_put(const struct dax_return *taken)
{
	path_put(&taken->path);
	put_cred(taken->cred);
}

/* Does not wait for programs that have a lease of the file: others share the worker. */
static struct file *dax_return_open(const struct dax_return *taken)
{
	return dentry_open(&taken->path, O_RDONLY | O_LARGEFILE | O_NONBLOCK, taken->cred);
}

/* Refreshes the table after a pause. The caller is a user. */
static void dax_table_return_later(struct dax_table *table, const struct path *path,
				   const struct cred *cred)
{
	spin_lock(&table->lock);
	if (!table->return_to.cred) {
		dax_table_get(table);
		table->return_to.path = *path;
		path_get(&table->return_to.path);
		table->return_to.cred = get_cred(cred);
		queue_delayed_work(dax_work, &table->returning, table->pause);
		table->pause = min_t(unsigned long, 2 * table->pause, DAX_LONGEST_PAUSE);
	}
	spin_unlock(&table->lock);
}

static int dax_table_refresh_by(struct dax_table *table, struct file *file,
				struct dax_stored *stored);

/* The memory cgroup that the table's root is charged to has what the worker adds, too. */
static void dax_table_refresh_as_charged(struct dax_table *table, struct file *file)
{
	struct mem_cgroup *group, *before;

	down_read(&table->shape);
	group = vellum_memory_group(table->tree.root);
	up_read(&table->shape);
	before = set_active_memcg(group);
	dax_table_refresh_by(table, file, NULL);
	set_active_memcg(before);
	mem_cgroup_put(group);
}

static void dax_table_return(struct work_struct *work)
{
	struct dax_table *table = container_of(to_delayed_work(work), struct dax_table, returning);
	struct dax_return taken;
	struct file *file;

	spin_lock(&table->lock);
	dax_table_take_return(table, &taken);
	spin_unlock(&table->lock);
	file = dax_return_open(&taken);
	/* After an error the file system goes on to serve the mappings, until the next fault. */
	if (!IS_ERR(file))
		dax_table_refresh_as_charged(table, file);
	else if (PTR_ERR(file) == -EWOULDBLOCK)
		dax_table_return_later(table, &taken.path, taken.cred);
	dax_table_put(table, IS_ERR(file) ? NULL : file);
	if (!IS_ERR(file))
		fput(file);
	dax_return_put(&taken);
}

void dax_table_refresh_later(struct dax_table *table, const struct file *file)
{
	if (!delayed_work_pending(&table->returning))
		dax_table_return_later(table, &file->f_path, file->f_cred);
}

bool dax_table_cancel_refresh(struct dax_table *table, struct dax_return *taken)
{
	bool is_cancelled;

	spin_lock(&table->lock);
	is_cancelled = cancel_delayed_work(&table->returning) &&
		       dax_table_take_return(table, taken);
	spin_unlock(&table->lock);
	return is_cancelled;
}

struct dax_table *dax_table_make(const struct file *file)
{
	struct dax_table *table = kzalloc(sizeof(*table), GFP_KERNEL_ACCOUNT);
	int error;

	if (!table)
		return ERR_PTR(-ENOMEM);
	refcount_set(&table->users, 1);
	kref_init(&table->references);
	table->mapping = file_inode(file)->i_mapping;
	INIT_WORK(&table->destruction, dax_table_destroy);
	INIT_DELAYED_WORK(&table->returning, dax_table_return);
	mutex_init(&table->building);
	mutex_init(&table->syncing);
	init_rwsem(&table->shape);
	pt_mounts_init(&table->mounts);
	spin_lock_init(&table->attachments_lock);
	INIT_LIST_HEAD(&table->attachments);
	spin_lock_init(&table->lock);
	table->pause = DAX_FIRST_PAUSE;
	table->missing = U64_MAX;
	table->generation = file_inode(file)->i_generation;
	error = dax_blocks_open(table, file);
	if (error)
		goto no_blocks;
	error = pt_tree_init_sparse(&table->tree, PG_LEVEL_4K, NULL);
	if (error)
		goto no_tree;
	return table;
no_tree:
	dax_blocks_close(table);
no_blocks:
	mutex_destroy(&table->syncing);
	mutex_destroy(&table->building);
	kfree(table);
	return ERR_PTR(error);
}

void dax_table_discard(struct dax_table *table)
{
	dax_table_destroy(&table->destruction);
}

void dax_table_rest(struct dax_table *table)
{
	spin_lock(&table->lock);
	table->is_durable = false;
	table->pause = DAX_FIRST_PAUSE;
	spin_unlock(&table->lock);
}

/*
 * Nothing has told the module of blocks that came meanwhile. A new table would have leaves for
 * them. So pages from the first one on that has no leaf are looked up again.
 */
void dax_table_resume(struct dax_table *table)
{
	spin_lock(&table->lock);
	table->pages = min(table->pages, table->missing);
	table->missing = U64_MAX;
	spin_unlock(&table->lock);
}

/* Shape. */

int dax_table_grow(struct dax_table *table, unsigned int order)
{
	int error = 0;

	lockdep_assert_held_write(&table->shape);
	while (!error && table->tree.order < order)
		error = pt_tree_grow(&table->tree);
	return error;
}

/* Makes the page's table of level 2, or its table of level 1. */
static int dax_table_make_table(struct dax_table *table, u64 page, unsigned int level)
{
	u64 guarded = pt_tree_guarded(&table->tree, page);
	pteval_t *made = level == PG_LEVEL_4K ? pt_tree_make_leaf(&table->tree, page) :
						pt_tree_make_entry(&table->tree, page);

	if (!made)
		return -ENOMEM;
	/* CPUs that have the guard cached would find nothing for good. */
	if (guarded)
		pt_mounts_flush_tables(&table->mounts, round_down(page, guarded), guarded);
	return 0;
}

int dax_table_make_room(struct dax_table *table, u64 pages)
{
	int error = 0;
	u64 page;

	lockdep_assert_held(&table->shape);
	for (page = 0; !error && table->tree.order > PG_LEVEL_2M && page < pages;
	     page += pt_entry_pages(PG_LEVEL_1G)) {
		error = fatal_signal_pending(current) ?
				-EINTR : dax_table_make_table(table, page, PG_LEVEL_2M);
		cond_resched();
	}
	return error;
}

static int dax_table_fit(struct dax_table *table, u64 pages)
{
	unsigned int order = pt_order_for(pages);
	int error;

	if (order > DAX_MAX_ORDER)
		return -EFBIG;
	down_write(&table->shape);
	error = dax_table_grow(table, order);
	up_write(&table->shape);
	return error;
}

/* Refreshing. */

/* What a refresh has to look up. */
struct dax_plan {
	struct file	*file;		/* the refresh's own, for reading */
	struct dax_lookup lookup;
	struct dax_stored *stored;	/* the stored table; NULL: there is none */
	u64		*frames;	/* of the pages of one table */
	u64		first, end;	/* pages that were stale */
	u64		pages, size;	/* what was appended: pages from `pages` to `size` */
	u64		missing;	/* the first page that was found to have no block */
	u64		notices;
	u32		generation;
	bool		misses;		/* pages below `pages` without a leaf may have blocks */
	bool		has_lost;	/* leaves were cleared or changed */
	bool		is_durable;
};

static void dax_table_plan(struct dax_table *table, struct dax_plan *plan)
{
	plan->generation = READ_ONCE(dax_inode(table)->i_generation);
	plan->size = dax_size_in_pages(table);
	spin_lock(&table->lock);
	if (plan->generation != table->generation)
		dax_mark_stale(table, 0, U64_MAX);
	plan->pages = table->pages;
	plan->first = table->stale_first;
	plan->end = table->stale_end;
	plan->notices = table->notices;
	plan->missing = U64_MAX;
	plan->misses = table->misses;
	plan->has_lost = false;
	plan->is_durable = table->is_durable;
	table->misses = false;
	spin_unlock(&table->lock);
	plan->lookup = (struct dax_lookup){ plan->file };
}

/* From now on notices of all pages that are looked up count. The tree has room for them. */
static void dax_table_begin(struct dax_table *table, const struct dax_plan *plan)
{
	spin_lock(&table->lock);
	table->reach = max(table->reach, plan->size);
	spin_unlock(&table->lock);
}

/*
 * A leaf that is right stays as it is, with what CPUs have noted there. Of another one the block
 * may be the file's at a new place, so what was stored there is written back. Returns whether there
 * was such a leaf.
 */
static bool dax_table_change_leaves(struct dax_table *table, pteval_t *leaf, unsigned int count,
				    const u64 *frames)
{
	spinlock_t *lock = pt_table_lock(leaf);
	bool has_lost = false;
	unsigned int i;
	pteval_t old;

	for (i = 0; i < count; i++) {
		old = READ_ONCE(leaf[i]);
		if (old ? pt_leaf_pfn(old) == frames[i] : !frames[i])
			continue;
		spin_lock(lock);
		old = xchg(leaf + i, frames[i] ? (frames[i] << PAGE_SHIFT) | DAX_LEAF_FLAGS : 0);
		spin_unlock(lock);
		has_lost |= old;
		if (old & _PAGE_DIRTY) {
			arch_wb_cache_pmem(__va(old & PTE_PFN_MASK), PAGE_SIZE);
			WRITE_ONCE(table->is_stored, true);
		}
	}
	return has_lost;
}

/* Gives the pages of one table the leaves that lead to these frames, or none. */
static int dax_table_put_leaves(struct dax_table *table, u64 page, unsigned int count,
				struct dax_plan *plan)
{
	const u64 *frames = plan->frames;
	pteval_t *leaf;
	int error = 0;

	down_read(&table->shape);
	if (memchr_inv(frames, 0, count * sizeof(*frames)))
		error = dax_table_make_table(table, page, PG_LEVEL_4K);
	leaf = error ? NULL : pt_tree_leaf(&table->tree, page);
	if (leaf)
		plan->has_lost |= dax_table_change_leaves(table, leaf, count, frames);
	up_read(&table->shape);
	return error;
}

/* The number of pages from this one on that have no leaf, because there is no table for them. */
static u64 dax_table_missing(struct dax_table *table, u64 page)
{
	unsigned int level;
	u64 pages;

	down_read(&table->shape);
	level = pt_tree_missing(&table->tree, page);
	up_read(&table->shape);
	pages = level ? pt_entry_pages(level + 1) : 0;
	return pages ? pages - page % pages : 0;
}

/* Gets the frames to which the leaves of pages of one table lead; 0 where there is none. */
static void dax_table_get_frames(struct dax_table *table, u64 page, unsigned int count,
				 u64 *frames)
{
	pteval_t *leaf;
	unsigned int i;

	down_read(&table->shape);
	leaf = pt_tree_leaf(&table->tree, page);
	for (i = 0; i < count; i++)
		frames[i] = leaf ? pt_leaf_pfn(READ_ONCE(leaf[i])) : 0;
	up_read(&table->shape);
}

/* Asks for the frames of pages that have none so far. */
static int dax_table_find_frames(struct dax_table *table, u64 page, unsigned int count,
				 struct dax_plan *plan)
{
	struct dax_lookup *lookup = &plan->lookup;
	u64 *frames = plan->frames;
	unsigned int i, run;
	int error = 0;

	for (i = 0; !error && i < count; i += run) {
		run = 1;
		if (frames[i])
			continue;
		while (i + run < count && !frames[i + run])
			run++;
		error = plan->stored ?
				dax_stored_find(plan->stored, table, lookup, page + i, run,
						frames + i) :
				dax_blocks_find(table, lookup, page + i, run, frames + i);
	}
	return error;
}

static void dax_note_missing(struct dax_plan *plan, u64 page, unsigned int count)
{
	unsigned int i;

	for (i = 0; i < count && plan->frames[i]; i++)
		;
	if (i < count)
		plan->missing = min(plan->missing, page + i);
}

/* Looks up the pages of one table, or a part of them; or only those that have no leaf. */
static int dax_table_look_up_some(struct dax_table *table, u64 page, unsigned int count,
				  struct dax_plan *plan, bool only_missing)
{
	unsigned int there = page < plan->size ? min_t(u64, count, plan->size - page) : 0;
	int error;

	memset(plan->frames, 0, count * sizeof(*plan->frames));
	if (only_missing)
		dax_table_get_frames(table, page, there, plan->frames);
	error = dax_table_find_frames(table, page, there, plan);
	dax_note_missing(plan, page, there);
	if (!error && plan->is_durable && there)
		error = vfs_fsync_range(plan->file, 0, LLONG_MAX, 1);
	return error ? error : dax_table_put_leaves(table, page, count, plan);
}

static int dax_table_look_up(struct dax_table *table, u64 first, u64 end,
			     struct dax_plan *plan, bool only_missing)
{
	u64 page, count, data = first;
	int error = 0;

	for (page = first; !error && page < end; page += count) {
		if (data <= page)
			data = dax_blocks_next(plan->file, page);
		/* A hole may be as long as the longest file. */
		count = min(end, data) - page;
		count = min(count, dax_table_missing(table, page));
		if (count) {
			plan->missing = min(plan->missing, page);
			continue;
		}
		count = min(end, round_down(page, PT_ENTRIES) + PT_ENTRIES) - page;
		error = dax_table_look_up_some(table, page, count, plan, only_missing);
	}
	return error;
}

/*
 * Takes the pages for right, unless some were marked as stale meanwhile. A file that collapses is
 * shorter only after its pages were: what is appended later was not looked up.
 */
static bool dax_table_conclude(struct dax_table *table, const struct dax_plan *plan)
{
	bool is_right;

	filemap_invalidate_lock_shared(table->mapping);
	spin_lock(&table->lock);
	is_right = table->notices == plan->notices && table->is_durable == plan->is_durable &&
		   READ_ONCE(dax_inode(table)->i_generation) == plan->generation;
	if (is_right) {
		table->generation = plan->generation;
		table->stale_first = 0;
		table->stale_end = 0;
		table->pages = min(plan->size, dax_size_in_pages(table));
		table->reach = plan->size;
		table->missing = min(table->missing, plan->missing);
		if (plan->stored)
			table->stored = dax_stored_conclude(plan->stored);
	}
	spin_unlock(&table->lock);
	filemap_invalidate_unlock_shared(table->mapping);
	return is_right;
}

static int dax_table_attempt(struct dax_table *table, struct dax_plan *plan)
{
	int error;

	dax_table_plan(table, plan);
	if (plan->stored)
		dax_stored_begin(plan->stored);
	error = dax_table_fit(table, plan->size);
	if (error)
		return error;
	dax_table_begin(table, plan);
	error = dax_table_look_up(table, plan->first, plan->end, plan, false);
	/*
	 * A fault that found such a leaf before the table was taken out may note an access in it,
	 * under the lock of another table: the leaf is there again.
	 */
	if (!error && plan->has_lost && PT_FAULT_READS_TWICE) {
		synchronize_rcu();
		error = dax_table_look_up(table, plan->first, plan->end, plan, false);
	}
	if (!error && plan->misses)
		error = dax_table_look_up(table, 0, min(plan->pages, plan->size), plan, true);
	if (!error)
		error = dax_table_look_up(table, plan->pages, plan->size, plan, false);
	if (!error && dax_table_conclude(table, plan))
		return 0;
	if (plan->misses)
		dax_table_misses(table, 0);
	return error ? error : -EBUSY;
}

static int dax_table_try(struct dax_table *table, struct dax_plan *plan)
{
	unsigned int attempt;
	int error = -EBUSY;

	if (mutex_lock_killable(&table->building))
		return -EINTR;
	for (attempt = 0; error == -EBUSY && attempt < DAX_ATTEMPTS; attempt++)
		error = dax_table_attempt(table, plan);
	mutex_unlock(&table->building);
	return error;
}

/* Whether a refresh would find nothing to do. Waits for another one that has begun. */
static bool dax_table_is_complete(struct dax_table *table)
{
	bool is_complete;

	if (mutex_lock_killable(&table->building))
		return false;
	filemap_invalidate_lock_shared(table->mapping);
	is_complete = dax_table_is_current(table, U64_MAX) && !READ_ONCE(table->misses);
	filemap_invalidate_unlock_shared(table->mapping);
	mutex_unlock(&table->building);
	return is_complete;
}

/* Refreshes the table by a descriptor whose position may change. */
static int dax_table_refresh_by(struct dax_table *table, struct file *file,
				struct dax_stored *stored)
{
	struct dax_plan plan = { .file = file, .stored = stored };
	int error;

	plan.frames = kmalloc_array(PT_ENTRIES, sizeof(*plan.frames), GFP_KERNEL_ACCOUNT);
	if (!plan.frames)
		return -ENOMEM;
	error = dax_table_try(table, &plan);
	kfree(plan.frames);
	if (!error)
		pt_mounts_unbar(&table->mounts);
	return error;
}

/* The first refresh has the stored table, if there is one. */
static struct dax_stored *dax_table_load_stored(struct dax_table *table, const struct file *file)
{
	bool is_first;

	spin_lock(&table->lock);
	is_first = !table->was_looked_for;
	table->was_looked_for = true;
	spin_unlock(&table->lock);
	return is_first ? dax_stored_load(file) : NULL;
}

/* The next refresh looks for the stored table. */
static void dax_table_look_again(struct dax_table *table)
{
	spin_lock(&table->lock);
	table->was_looked_for = false;
	spin_unlock(&table->lock);
}

static int dax_table_refresh_with(struct dax_table *table, struct file *file,
				  struct dax_stored *stored)
{
	int error = dax_table_refresh_by(table, file, IS_ERR(stored) ? NULL : stored);

	if (IS_ERR(stored) || (stored && (error == -EINTR || error == -ENOMEM)))
		dax_table_look_again(table);
	if (!IS_ERR(stored))
		dax_stored_free(stored);
	return error;
}

/*
 * To open the file may wait for other programs (leases, fanotify). So no lock is held, and the file
 * is not opened for nothing.
 */
int dax_table_refresh(struct dax_table *table, const struct file *file)
{
	struct file *own;
	int error;

	if (dax_table_is_complete(table)) {
		pt_mounts_unbar(&table->mounts);
		return 0;
	}
	own = dentry_open(&file->f_path, O_RDONLY | O_LARGEFILE, file->f_cred);
	if (IS_ERR(own))
		return PTR_ERR(own);
	dax_blocks_probe(table);
	error = dax_table_refresh_with(table, own, dax_table_load_stored(table, own));
	fput(own);
	return error;
}

int dax_table_make_durable(struct dax_table *table, const struct file *file)
{
	spin_lock(&table->lock);
	if (!table->is_durable) {
		table->is_durable = true;
		dax_mark_stale(table, 0, U64_MAX);
	}
	spin_unlock(&table->lock);
	return dax_table_refresh(table, file);
}

void dax_table_each_leaf(struct dax_table *table,
			 void (*visit)(void *data, u64 page, pteval_t leaf), void *data)
{
	struct pt_tree tree;

	/* The tree may grow meanwhile. What was its root stays in it. */
	down_read(&table->shape);
	tree = table->tree;
	up_read(&table->shape);
	pt_tree_each_leaf(&tree, visit, data);
}

bool dax_table_shows(struct dax_table *table, u64 page)
{
	pteval_t *leaf = NULL;

	if (dax_table_is_stale(table))
		return false;
	down_read(&table->shape);
	if (page < table->tree.pages)
		leaf = pt_tree_leaf(&table->tree, page);
	up_read(&table->shape);
	return leaf && READ_ONCE(*leaf);
}

/* Checking. */

struct dax_census {
	struct dax_table	*table;
	u64			wrong;
};

static void dax_count_wrong(void *data, u64 page, pteval_t leaf)
{
	struct dax_census *census = data;
	u64 frame = 0;

	if (!dax_blocks_find(census->table, NULL, page, 1, &frame))
		census->wrong += frame != pt_leaf_pfn(leaf);
}

u64 dax_table_wrong(struct dax_table *table)
{
	struct dax_census census = { table };

	mutex_lock(&table->building);
	/* What is stale may be wrong. */
	if (!dax_table_is_stale(table))
		dax_table_each_leaf(table, dax_count_wrong, &census);
	/* What became stale meanwhile may have been right. */
	if (dax_table_is_stale(table))
		census.wrong = 0;
	mutex_unlock(&table->building);
	return census.wrong;
}
