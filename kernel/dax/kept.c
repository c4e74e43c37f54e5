// SPDX-License-Identifier: GPL-2.0
/*
 * All file tables: finding a file's, and keeping those that have no user. dax.h says why that is
 * safe.
 *
 * A kept table stays as long as its inode is cached, unless its memory is wanted back: kept tables
 * take no more than a bound, and a shrinker frees those first that were used last the longest ago.
 * Those that are charged to a memory cgroup take no more than the same part of its limit: when a
 * cgroup runs out of memory, the kernel kills a process sooner than a shrinker's work has freed
 * page tables.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/hashtable.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/rculist.h>
#include <linux/shrinker.h>
#include <linux/slab.h>

#include "dax/dax.h"

/* Kept tables may take this part of memory, unless the parameter says otherwise. */
#define DAX_KEPT_PART	64

/* More limits than these share their bounds. */
#define DAX_LIMITS	1024

/* The struct of a table takes as much as a page table, at most. */
#define DAX_KEPT_STRUCT	1

struct workqueue_struct *dax_work, *dax_end_work;

static DEFINE_SPINLOCK(dax_tables_lock);	/* protects all below */
/* By the file's mapping. Read under RCU, too. */
static DEFINE_HASHTABLE(dax_tables, 12);
static struct vellum_dax_tables dax_counts;

/* Tables that are kept, and the pages that they take. */
struct dax_kept {
	struct list_head	tables;	/* begins with the one that was used last the longest ago */
	u64			pages;
};

static struct dax_kept dax_kept = { LIST_HEAD_INIT(dax_kept.tables) };
static struct dax_kept dax_limited[DAX_LIMITS];	/* by the number of the cgroup with the limit */

static unsigned long dax_kept_kib = ULONG_MAX;

/* The bound, in pages. */
static u64 dax_kept_most(void)
{
	return READ_ONCE(dax_kept_kib) >> (PAGE_SHIFT - 10);
}

/* The end of a table. */

static void dax_table_unreferenced(struct kref *references)
{
	dax_table_destroy_later(container_of(references, struct dax_table, references));
}

/* The table is among those that are kept no longer. */
static void dax_unkeep(struct dax_table *table)
{
	lockdep_assert_held(&dax_tables_lock);
	list_del(&table->kept);
	dax_counts.kept--;
	dax_kept.pages -= table->kept_pages;
	if (table->limited_by) {
		list_del(&table->limited);
		table->limited_by->pages -= table->kept_pages;
	}
}

/* No thread finds the table from now on, and it has no user. It is not among the kept ones. */
static void dax_drop(struct dax_table *table)
{
	lockdep_assert_held(&dax_tables_lock);
	hash_del_rcu(&table->node);
	dax_counts.tables--;
	kref_put(&table->references, dax_table_unreferenced);
}

static void dax_forget(struct dax_table *table)
{
	dax_unkeep(table);
	dax_drop(table);
}

static struct dax_table *dax_oldest(struct dax_kept *kept)
{
	if (kept == &dax_kept)
		return list_first_entry_or_null(&kept->tables, struct dax_table, kept);
	return list_first_entry_or_null(&kept->tables, struct dax_table, limited);
}

/*
 * Frees the table of these that was used last the longest ago, if they take more than so many
 * pages. Returns how many it takes.
 */
static u64 dax_reclaim(struct dax_kept *kept, u64 most)
{
	struct dax_table *table = NULL;
	u64 pages = 0;

	spin_lock(&dax_tables_lock);
	if (kept->pages > most)
		table = dax_oldest(kept);
	if (table) {
		pages = table->kept_pages;
		dax_counts.reclaimed++;
		dax_forget(table);
	}
	spin_unlock(&dax_tables_lock);
	return pages;
}

static void dax_reclaim_all_but(struct dax_kept *kept, u64 most)
{
	while (dax_reclaim(kept, most))
		cond_resched();
}

static struct dax_table *dax_table_of(const struct address_space *mapping)
{
	struct dax_table *table;

	hash_for_each_possible_rcu(dax_tables, table, node, (unsigned long)mapping,
				   lockdep_is_held(&dax_tables_lock))
		if (table->mapping == mapping)
			return table;
	return NULL;
}

void dax_table_evict(const struct address_space *mapping)
{
	struct dax_table *table;

	rcu_read_lock();
	table = dax_table_of(mapping);
	rcu_read_unlock();
	if (likely(!table))
		return;
	spin_lock(&dax_tables_lock);
	/* The shrinker may have been faster. A user has a descriptor of the file. */
	table = dax_table_of(mapping);
	if (table && !WARN_ON_ONCE(refcount_read(&table->users))) {
		dax_counts.evicted++;
		dax_forget(table);
	}
	spin_unlock(&dax_tables_lock);
}

/* Users. */

/* Returns the mapping's table with a user more; NULL: there is none, or it has no user so far. */
static struct dax_table *dax_table_find_used(const struct address_space *mapping)
{
	struct dax_table *table;

	rcu_read_lock();
	table = dax_table_of(mapping);
	if (table && !refcount_inc_not_zero(&table->users))
		table = NULL;
	rcu_read_unlock();
	return table;
}

/* The same for any table. */
static struct dax_table *dax_table_find(const struct address_space *mapping)
{
	struct dax_table *table;

	lockdep_assert_held(&dax_tables_lock);
	table = dax_table_of(mapping);
	if (table && !refcount_inc_not_zero(&table->users)) {
		dax_unkeep(table);
		dax_table_resume(table);
		dax_counts.resumed++;
		refcount_set(&table->users, 1);
	}
	return table;
}

/* Adds a table, unless the file has one by now, which it returns. */
static struct dax_table *dax_table_add(struct dax_table *made)
{
	struct dax_table *table;

	spin_lock(&dax_tables_lock);
	table = dax_table_find(made->mapping);
	if (!table) {
		hash_add_rcu(dax_tables, &made->node, (unsigned long)made->mapping);
		dax_counts.tables++;
	}
	spin_unlock(&dax_tables_lock);
	return table;
}

struct dax_table *dax_table_open(const struct file *file)
{
	struct address_space *mapping = file_inode(file)->i_mapping;
	struct dax_table *table = dax_table_find_used(mapping), *made;

	if (!table) {
		spin_lock(&dax_tables_lock);
		table = dax_table_find(mapping);
		spin_unlock(&dax_tables_lock);
	}
	if (table)
		return table;
	made = dax_table_make(file);
	if (IS_ERR(made))
		return made;
	table = dax_table_add(made);
	if (!table)
		return made;
	dax_table_discard(made);
	return table;
}

void dax_table_get(struct dax_table *table)
{
	refcount_inc(&table->users);
}

static void dax_keep(struct dax_table *table, struct dax_kept *limited_by)
{
	lockdep_assert_held(&dax_tables_lock);
	dax_table_rest(table);
	list_add_tail(&table->kept, &dax_kept.tables);
	dax_counts.kept++;
	dax_kept.pages += table->kept_pages;
	table->limited_by = limited_by;
	if (limited_by) {
		list_add_tail(&table->limited, &limited_by->tables);
		limited_by->pages += table->kept_pages;
	}
}

/*
 * Keeps a table that has no user any more, unless it would replace all others, or its file has no
 * link. Releases the lock of all tables.
 */
static void dax_table_unused(struct dax_table *table)
	__releases(&dax_tables_lock)
{
	unsigned int number = 0;
	u64 limit = vellum_memory_limit(table->tree.root, &number);
	struct dax_kept *limited_by = limit == U64_MAX ? NULL : &dax_limited[number % DAX_LIMITS];

	limit /= DAX_KEPT_PART;
	table->kept_pages = atomic_long_read(&table->tree.tables) + DAX_KEPT_STRUCT;
	if (table->kept_pages > min(limit, dax_kept_most()) || !dax_inode(table)->i_nlink) {
		dax_drop(table);
		spin_unlock(&dax_tables_lock);
		return;
	}
	dax_keep(table, limited_by);
	spin_unlock(&dax_tables_lock);
	dax_reclaim_all_but(&dax_kept, dax_kept_most());
	if (limited_by)
		dax_reclaim_all_but(limited_by, limit);
}

/*
 * A user less, unless it is the last one. A refresh that is to come is a user for which no thread
 * waits: the thread that takes the last other user away cancels it. Otherwise it would keep the
 * file for as long as its pause is, and run when the module may be gone.
 */
static bool dax_table_leave(struct dax_table *table)
{
	struct dax_return taken = {};
	bool has_left;

	/* The table stays under RCU, also if the refresh has begun and is its last user. */
	rcu_read_lock();
	has_left = refcount_dec_not_one(&table->users);
	if (has_left && refcount_read(&table->users) == 1)
		has_left = !dax_table_cancel_refresh(table, &taken);
	rcu_read_unlock();
	if (taken.cred)
		dax_return_put(&taken);
	return has_left;
}

void dax_table_put(struct dax_table *table, struct file *file)
{
	while (!dax_table_leave(table)) {
		spin_lock(&dax_tables_lock);
		if (!refcount_dec_if_one(&table->users)) {
			spin_unlock(&dax_tables_lock);
			continue;
		}
		if (!table->is_written) {
			dax_table_unused(table);
			return;
		}
		/* This thread is a user again. Others may come, and may store something. */
		table->is_written = false;
		refcount_set(&table->users, 1);
		spin_unlock(&dax_tables_lock);
		/* The program may still expect fsync of the file to find what it has stored. */
		dax_flush_stores(table, 0, U64_MAX);
		dax_update_times(table, file);
	}
}

void dax_table_notice(const struct address_space *mapping, u64 first, u64 count)
{
	u64 end = count > U64_MAX - first ? U64_MAX : first + count;
	struct dax_table *table;

	rcu_read_lock();
	hash_for_each_possible_rcu(dax_tables, table, node, (unsigned long)mapping)
		if (table->mapping == mapping)
			dax_table_lose(table, first, end);
	rcu_read_unlock();
}

/* Visits. */

/* What keeps a table, and its inode, during a visit. */
struct dax_visit {
	struct dax_table	*table;
	struct super_block	*super;
	struct inode		*inode;		/* NULL: it is being evicted */
};

/*
 * A table that is in the hash has an inode that is not freed yet. But the table may have no user,
 * and then the inode may be evicted at any time, and its file system unmounted.
 */
static bool dax_visit_begin(struct dax_visit *visit, struct dax_table *table)
{
	struct inode *inode = dax_inode(table);

	lockdep_assert_held(&dax_tables_lock);
	if (!atomic_inc_not_zero(&inode->i_sb->s_active))
		return false;
	kref_get(&table->references);
	*visit = (struct dax_visit){ table, inode->i_sb, igrab(inode) };
	return true;
}

static void dax_visit_end(const struct dax_visit *visit)
{
	iput(visit->inode);
	deactivate_super(visit->super);
	kref_put(&visit->table->references, dax_table_unreferenced);
}

/* Begins a visit of as many tables as there is room for. */
static u64 dax_visits_begin(struct dax_visit *visits, u64 room)
{
	struct dax_table *table;
	unsigned int bucket;
	u64 count = 0;

	spin_lock(&dax_tables_lock);
	hash_for_each(dax_tables, bucket, table, node) {
		if (count == room)
			break;
		count += dax_visit_begin(&visits[count], table);
	}
	spin_unlock(&dax_tables_lock);
	return count;
}

int dax_tables_each(void (*visit)(void *data, struct dax_table *table), void *data)
{
	u64 room = READ_ONCE(dax_counts.tables), count, i;
	struct dax_visit *visits = kvmalloc_array(room, sizeof(*visits), GFP_KERNEL);

	if (!visits && room)
		return -ENOMEM;
	count = dax_visits_begin(visits, room);
	for (i = 0; i < count; i++) {
		if (visits[i].inode)
			visit(data, visits[i].table);
		dax_visit_end(&visits[i]);
	}
	kvfree(visits);
	return 0;
}

void dax_tables_count(struct vellum_dax_tables *counts)
{
	spin_lock(&dax_tables_lock);
	*counts = dax_counts;
	counts->kept_bytes = dax_kept.pages << PAGE_SHIFT;
	spin_unlock(&dax_tables_lock);
	counts->kept_most = dax_kept_most() << PAGE_SHIFT;
	dax_stored_count(counts);
}

/* The bound. */

static int dax_kept_set(const char *value, const struct kernel_param *parameter)
{
	int error = param_set_ulong(value, parameter);

	if (!error)
		dax_reclaim_all_but(&dax_kept, dax_kept_most());
	return error;
}

static const struct kernel_param_ops dax_kept_operations = {
	.set = dax_kept_set,
	.get = param_get_ulong,
};

module_param_cb(dax_kept_kib, &dax_kept_operations, &dax_kept_kib, 0644);
MODULE_PARM_DESC(dax_kept_kib,
		 "KiB that file tables without a user may take (default: a 64th of memory)");

static unsigned long dax_shrinker_count(struct shrinker *shrinker, struct shrink_control *control)
{
	return READ_ONCE(dax_kept.pages) ?: SHRINK_EMPTY;
}

static unsigned long dax_shrinker_scan(struct shrinker *shrinker, struct shrink_control *control)
{
	unsigned long freed = 0;
	u64 pages;

	while (freed < control->nr_to_scan) {
		pages = dax_reclaim(&dax_kept, 0);
		if (!pages)
			break;
		freed += pages;
	}
	control->nr_scanned = freed;
	return freed ?: SHRINK_STOP;
}

static struct shrinker dax_shrinker_like = {
	.count_objects = dax_shrinker_count,
	.scan_objects = dax_shrinker_scan,
	.seeks = DEFAULT_SEEKS,
};

static struct shrinker *dax_shrinker;

int dax_tables_start(void)
{
	unsigned int i;

	for (i = 0; i < DAX_LIMITS; i++)
		INIT_LIST_HEAD(&dax_limited[i].tables);
	if (dax_kept_kib == ULONG_MAX)
		dax_kept_kib = (totalram_pages() / DAX_KEPT_PART) << (PAGE_SHIFT - 10);
	dax_work = alloc_workqueue("vellum-dax", WQ_UNBOUND, 0);
	if (!dax_work)
		return -ENOMEM;
	/* The shrinker's tables are freed there. */
	dax_end_work = alloc_workqueue("vellum-dax-end", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!dax_end_work)
		goto no_end_work;
	dax_shrinker = vellum_shrinker_register("vellum-dax", &dax_shrinker_like);
	if (dax_shrinker)
		return 0;
	destroy_workqueue(dax_end_work);
no_end_work:
	destroy_workqueue(dax_work);
	return -ENOMEM;
}

void dax_tables_end(void)
{
	/* Work that has begun may be the last user of a table. None is to come: see above. */
	destroy_workqueue(dax_work);
	vellum_shrinker_unregister(dax_shrinker);
	dax_reclaim_all_but(&dax_kept, 0);
	WARN_ON_ONCE(dax_counts.tables);
	/* The tables are in the queue after a grace period. */
	pt_wait_for_walks();
	rcu_barrier();
	destroy_workqueue(dax_end_work);
}
