// SPDX-License-Identifier: GPL-2.0
/* The pool: its size, the charges for it, and the shrinker. */

#include <linux/capability.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>

#include "core/compat.h"
#include "exmap/exmap.h"

/* Pages of an interface: its vector, ranges, results and leaving entries, and its lane's frame. */
#define EXMAP_INTERFACE_PAGES	6

/* The number of pages that the caller may lock. */
static u64 exmap_limit_of_caller(void)
{
	return capable(CAP_IPC_LOCK) ? U64_MAX : rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
}

/*
 * Charges pages to the exmap's user as locked memory. The user is the creator of the exmap or the
 * first to map it, also where another process makes it larger.
 */
static bool exmap_charge_user(struct exmap *exmap, u64 pages, u64 limit)
{
	long before = atomic_long_read(&exmap->user->locked_vm);

	do {
		if (before + pages > limit)
			return false;
	} while (!atomic_long_try_cmpxchg(&exmap->user->locked_vm, &before, before + pages));
	return true;
}

u64 exmap_chargeable(struct exmap *exmap)
{
	u64 before = atomic_long_read(&exmap->user->locked_vm);

	return exmap->lock_limit > before ? exmap->lock_limit - before : 0;
}

/* The caller holds `setup`. */
static void exmap_set_user(struct exmap *exmap)
{
	if (!exmap->user)
		exmap->user = get_uid(current_user());
}

static int exmap_charge(struct exmap *exmap, u64 pages)
{
	if (!exmap_charge_user(exmap, pages, exmap_limit_of_caller()))
		return -EPERM;
	exmap->charged += pages;
	return 0;
}

void exmap_uncharge(struct exmap *exmap, u64 pages)
{
	if (pages)
		atomic_long_sub(pages, &exmap->user->locked_vm);
	exmap->charged -= pages;
}

u64 *exmap_alloc_charged(struct exmap *exmap)
{
	u64 *page;

	if (!exmap_charge_user(exmap, 1, exmap->lock_limit))
		return NULL;
	page = (u64 *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
	if (!page)
		atomic_long_dec(&exmap->user->locked_vm);
	return page;
}

void exmap_free_charged(struct exmap *exmap, u64 *page)
{
	free_page((unsigned long)page);
	atomic_long_dec(&exmap->user->locked_vm);
}

static struct exmap *exmap_of_source(struct pt_source *source)
{
	return container_of(source, struct exmap, source);
}

static pteval_t *exmap_alloc_table(struct pt_source *source, unsigned int level)
{
	struct exmap *exmap = exmap_of_source(source);
	pteval_t *table;

	if (!exmap_charge_user(exmap, 1, exmap->lock_limit))
		return NULL;
	table = pt_table_alloc(level);
	if (!table)
		atomic_long_dec(&exmap->user->locked_vm);
	return table;
}

static void exmap_free_table(struct pt_source *source, pteval_t *table, unsigned int level)
{
	pt_table_free(table, level);
	atomic_long_dec(&exmap_of_source(source)->user->locked_vm);
}

void exmap_charge_tables(struct exmap *exmap)
{
	exmap_set_user(exmap);
	exmap->lock_limit = exmap_limit_of_caller();
	exmap->source = (struct pt_source){ .alloc = exmap_alloc_table, .free = exmap_free_table };
}

static enum frame_design exmap_frame_design(u64 flags)
{
	if (flags & VELLUM_EXMAP_NO_POOL)
		return FRAMES_FROM_KERNEL;
	return flags & VELLUM_EXMAP_STEALING ? FRAMES_STEALING : FRAMES_BUNDLES;
}

/* Fills the pool. Frames replace the blocks that the kernel does not have. */
static int exmap_fill_pool(struct frame_pool *pool, const struct vellum_exmap_create *create)
{
	u64 frames;
	int error = frame_pool_init(pool, exmap_frame_design(create->flags), create->frames,
				    create->interfaces);

	if (error)
		return error;
	error = frame_blocks_init(pool, create->blocks);
	frames = create->frames + (u64)(create->blocks - pool->block_count) * FRAME_BLOCK;
	if (!error && frame_pool_resize(pool, pool->lanes, frames) != frames)
		error = -ENOMEM;
	if (error)
		frame_pool_destroy(pool);
	return error;
}

int exmap_make_pool(struct exmap *exmap, const struct vellum_exmap_create *create)
{
	u64 frames = create->frames + (u64)create->blocks * FRAME_BLOCK;
	u64 pages;
	int error;

	if (create->frames > totalram_pages() || frames > totalram_pages())
		return -ENOMEM;
	pages = frames + create->interfaces * EXMAP_INTERFACE_PAGES;
	exmap_set_user(exmap);
	error = exmap_charge(exmap, pages);
	if (error)
		return error;
	error = exmap_fill_pool(&exmap->pool, create);
	if (error)
		exmap_uncharge(exmap, pages);
	return error;
}

static long exmap_resize_locked(struct exmap *exmap, u64 frames)
{
	u64 before = exmap->pool.frames, now;
	int error = 0;

	if (frames > before)
		error = exmap_charge(exmap, frames - before);
	if (error)
		return error;
	now = frame_pool_resize(&exmap->pool, &exmap->pool.lanes[0], frames);
	exmap_uncharge(exmap, max(frames, before) - now);
	if (now == frames)
		return 0;
	return now < frames ? -ENOMEM : -EBUSY;
}

long exmap_resize(struct exmap *exmap, u64 frames)
{
	long error = -EINTR;

	if (!exmap_is_created(exmap))
		return -ENODEV;
	if (!frames)
		return -EINVAL;
	if (frames > totalram_pages())
		return -ENOMEM;
	/* Frames come and go through the lane of interface 0. */
	if (mutex_lock_killable(&exmap->sizing))
		return error;
	if (!mutex_lock_killable(&exmap->interface[0].lock)) {
		error = exmap_resize_locked(exmap, frames);
		mutex_unlock(&exmap->interface[0].lock);
	}
	mutex_unlock(&exmap->sizing);
	return error;
}

static u64 exmap_shrinkable(struct exmap *exmap)
{
	u64 resident;

	if (!exmap_is_created(exmap) || !(exmap->flags & VELLUM_EXMAP_SHRINKS))
		return 0;
	resident = frame_pool_lent(&exmap->pool);
	return exmap->pool.frames > resident ? exmap->pool.frames - resident : 0;
}

static bool exmap_shrinker_count_one(struct exmap *exmap, void *data)
{
	*(unsigned long *)data += exmap_shrinkable(exmap);
	return true;
}

static unsigned long exmap_shrinker_count(struct shrinker *shrinker, struct shrink_control *control)
{
	unsigned long count = 0;

	if (!exmap_try_each(exmap_shrinker_count_one, &count))
		return 0;
	return count ?: SHRINK_EMPTY;
}

/* Shrinks the pool of an exmap. The last frame stays, so there is always a pool. */
static bool exmap_shrinker_scan_one(struct exmap *exmap, void *data)
{
	struct shrink_control *control = data;
	u64 before, most = exmap_shrinkable(exmap);

	if (!most || !mutex_trylock(&exmap->sizing))
		return true;
	if (mutex_trylock(&exmap->interface[0].lock)) {
		before = exmap->pool.frames;
		most = min3(most, (u64)control->nr_to_scan - control->nr_scanned, before - 1);
		exmap_resize_locked(exmap, before - most);
		control->nr_scanned += before - exmap->pool.frames;
		mutex_unlock(&exmap->interface[0].lock);
	}
	mutex_unlock(&exmap->sizing);
	return control->nr_scanned < control->nr_to_scan;
}

static unsigned long exmap_shrinker_scan(struct shrinker *shrinker, struct shrink_control *control)
{
	control->nr_scanned = 0;
	if (!exmap_try_each(exmap_shrinker_scan_one, control) || !control->nr_scanned)
		return SHRINK_STOP;
	return control->nr_scanned;
}

static struct shrinker exmap_shrinker_like = {
	.count_objects = exmap_shrinker_count,
	.scan_objects = exmap_shrinker_scan,
	.seeks = DEFAULT_SEEKS,
};

static struct shrinker *exmap_shrinker;

int exmap_shrinker_init(void)
{
	exmap_shrinker = vellum_shrinker_register("vellum-exmap", &exmap_shrinker_like);
	return exmap_shrinker ? 0 : -ENOMEM;
}

void exmap_shrinker_exit(void)
{
	vellum_shrinker_unregister(exmap_shrinker);
}
