// SPDX-License-Identifier: GPL-2.0
/*
 * Self-check: /sys/kernel/debug/vellum/exmaps has a line for each exmap, with all that does not add
 * up. While commands are under way the sums may differ by the frames that these have in hand.
 */

#include <linux/debugfs.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/seq_file.h>
#include <linux/sort.h>

#include "exmap/exmap.h"

/* The frames on the surface, as its tables have them. */
struct exmap_census {
	struct exmap	*exmap;
	u64		*frames;
	u64		room, count;
	u64		of_blocks;	/* frames of blocks */
	u64		stuck;		/* entries that a thread has claimed */
};

static void exmap_check_count_frame(void *data, u64 page, pteval_t leaf)
{
	struct exmap_census *census = data;

	census->stuck += leaf == PT_CLAIMED || leaf == PT_SPLITTING;
	if (!exmap_has_frame(census->exmap, leaf))
		return;
	census->of_blocks += census->exmap->pool.blocks &&
			     page_private(pfn_to_page(pt_leaf_pfn(leaf)));
	if (census->count < census->room)
		census->frames[census->count] = pt_leaf_pfn(leaf);
	census->count++;
}

static int exmap_check_by_number(const void *a, const void *b)
{
	u64 left = *(const u64 *)a, right = *(const u64 *)b;

	return left < right ? -1 : left > right;
}

static u64 exmap_check_shared_frames(struct exmap_census *census)
{
	u64 i, shared = 0;

	sort(census->frames, min(census->count, census->room), sizeof(u64), exmap_check_by_number,
	     NULL);
	for (i = 1; i < min(census->count, census->room); i++)
		shared += census->frames[i] == census->frames[i - 1];
	return shared;
}

static u64 exmap_check_mount(struct exmap *exmap)
{
	struct mm_struct *mm;
	u64 wrong = 0;

	/* The process' memory exists for as long as it is in the mount. */
	spin_lock(&exmap->mount.lock);
	mm = exmap->mount.mm;
	if (mm && !mmget_not_zero(mm))
		mm = NULL;
	spin_unlock(&exmap->mount.lock);
	if (!mm)
		return 0;
	/*
	 * A thread that maps the surface holds the mmap lock, and waits for `setup`, which is held
	 * here.
	 */
	if (mmap_read_trylock(mm)) {
		if (exmap->mount.mm == mm)
			wrong = pt_mount_wrong(&exmap->mount);
		mmap_read_unlock(mm);
	}
	mmput(mm);
	return wrong;
}

/*
 * Each frame of a block must be with its block, on the surface, or pinned, and each table in a
 * valid state.
 */
static void exmap_check_show_blocks(struct seq_file *file, const struct exmap_census *census)
{
	struct frame_pool *pool = &census->exmap->pool;
	u64 known;

	spin_lock(&pool->lock);
	known = (u64)pool->blocks_free * FRAME_BLOCK + pool->blocks_loose + pool->blocks_pinned +
		census->of_blocks;
	spin_unlock(&pool->lock);
	seq_printf(file, " blocks %u huge %ld free %u loose %llu lost %lld stuck %llu\n",
		   pool->block_count, atomic_long_read(&census->exmap->tree.huge),
		   pool->blocks_free, pool->blocks_loose,
		   (s64)((u64)pool->block_count * FRAME_BLOCK - known),
		   census->stuck + pt_huge_wrong(&census->exmap->tree));
}

static void exmap_check_show_one(struct seq_file *file, struct exmap *exmap)
{
	struct exmap_census census = {
		.exmap = exmap,
		.room = exmap->pool.frames + (u64)exmap->pool.block_count * FRAME_BLOCK,
	};

	census.frames = kvmalloc_array(census.room ?: 1, sizeof(u64), GFP_KERNEL);
	if (!census.frames)
		census.room = 0;
	pt_tree_each_leaf(&exmap->tree, exmap_check_count_frame, &census);
	seq_printf(file,
		   "frames %llu resident %llu on surface %llu twice %llu pinned %lu pages %llu ",
		   exmap->pool.frames,
		   exmap_is_created(exmap) ? frame_pool_resident(&exmap->pool) : 0, census.count,
		   exmap_check_shared_frames(&census), exmap->pool.pinned_count, exmap->tree.pages);
	seq_printf(file, "tables %ld entries %u wrong %llu attached %d",
		   atomic_long_read(&exmap->tree.tables), exmap->mount.count,
		   exmap_check_mount(exmap), exmap->mount.attached);
	if (exmap_is_created(exmap))
		exmap_check_show_blocks(file, &census);
	else
		seq_puts(file, " not created\n");
	kvfree(census.frames);
}

static bool exmap_check_show(struct exmap *exmap, void *file)
{
	/* Keeps the exmap from being pruned, created or mapped meanwhile. */
	down_read(&exmap->walking);
	mutex_lock(&exmap->setup);
	exmap_check_show_one(file, exmap);
	mutex_unlock(&exmap->setup);
	up_read(&exmap->walking);
	return true;
}

static int exmaps_show(struct seq_file *file, void *unused)
{
	exmap_each(exmap_check_show, file);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(exmaps);

void exmap_check_init(struct dentry *folder)
{
	debugfs_create_file("exmaps", 0400, folder, NULL, &exmaps_fops);
}
