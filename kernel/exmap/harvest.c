// SPDX-License-Identifier: GPL-2.0
/* Finds the pages that were accessed and written, as the CPUs note it in the page tables. */

#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/uaccess.h>

#include "exmap/exmap.h"

#define EXMAP_HARVEST_FLAGS	(VELLUM_EXMAP_CLEAR_ACCESSED | VELLUM_EXMAP_CLEAR_WRITTEN)

/* The number of pages whose bits fit into a word. */
#define EXMAP_HARVEST_WORD		64

struct exmap_harvest_words {
	u64	accessed, written;
	u64	present, cleared;	/* pages */
	unsigned int zeros;		/* EXMAP_ZEROS_* */
};

static pteval_t exmap_harvest_bits(u32 flags)
{
	pteval_t bits = 0;

	if (flags & VELLUM_EXMAP_CLEAR_ACCESSED)
		bits |= _PAGE_ACCESSED;
	if (flags & VELLUM_EXMAP_CLEAR_WRITTEN)
		bits |= _PAGE_DIRTY;
	return bits;
}

/* A surface with such pages does not track: they count as accessed and written from the start. */
static void exmap_harvest_huge(struct exmap *exmap, u64 page, unsigned int bit,
			       struct exmap_harvest_words *words)
{
	if (!exmap_frame(exmap, page))
		return;
	words->present++;
	words->accessed |= 1ULL << bit;
	words->written |= 1ULL << bit;
}

/* Returns the entry, and clears the bits of it if there is a frame. */
static pteval_t exmap_harvest_leaf(struct exmap *exmap, pteval_t *leaf, pteval_t clear)
{
	spinlock_t *lock = pt_table_lock(leaf);
	pteval_t old;

	spin_lock(lock);
	old = READ_ONCE(*leaf);
	while (exmap_has_frame(exmap, old) && (old & clear) &&
	       !try_cmpxchg(leaf, &old, old & ~clear))
		;
	spin_unlock(lock);
	return old;
}

/*
 * The same for a page of which the process has an entry of its own. What is noted there goes to the
 * leaf when the surface is detached, and to the entry when it is attached again. So both are read
 * in one moment: a note is in this harvest, and in no other.
 */
static noinline pteval_t exmap_harvest_tail(struct exmap *exmap, pteval_t *leaf, u64 page,
					    pteval_t clear)
{
	struct pt_mount *mount = &exmap->mount;
	pteval_t old;

	spin_lock(&mount->lock);
	old = exmap_harvest_leaf(exmap, leaf, clear);
	if (exmap_has_frame(exmap, old))
		old |= pt_mount_entry_bits(mount, page, clear);
	spin_unlock(&mount->lock);
	return old;
}

static void exmap_harvest_page(struct exmap *exmap, u64 page, pteval_t clear, unsigned int bit,
			       struct exmap_harvest_words *words)
{
	pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);
	pteval_t noted;

	if (!leaf || READ_ONCE(*leaf) == PT_SPLITTING) {
		exmap_harvest_huge(exmap, page, bit, words);
		return;
	}
	if (!exmap_has_frame(exmap, READ_ONCE(*leaf)))
		return;
	noted = unlikely(page >= exmap->mount.tail) ?
		exmap_harvest_tail(exmap, leaf, page, clear) :
		exmap_harvest_leaf(exmap, leaf, clear);
	if (!exmap_has_frame(exmap, noted))
		return;
	exmap_found(exmap, &words->zeros);
	words->present++;
	words->cleared += (noted & clear) != 0;
	if (noted & _PAGE_ACCESSED)
		words->accessed |= 1ULL << bit;
	if (noted & _PAGE_DIRTY)
		words->written |= 1ULL << bit;
}

static int exmap_harvest_put(const struct vellum_exmap_harvest *harvest, u64 index,
			     const struct exmap_harvest_words *words)
{
	u64 __user *accessed = u64_to_user_ptr(harvest->accessed);
	u64 __user *written = u64_to_user_ptr(harvest->written);

	if (accessed && put_user(words->accessed, accessed + index))
		return -EFAULT;
	return written && put_user(words->written, written + index) ? -EFAULT : 0;
}

long exmap_harvest(struct exmap *exmap, const struct vellum_exmap_harvest *harvest)
{
	/* Without tracking no other code expects entries that lack these bits. */
	pteval_t clear = exmap->flags & VELLUM_EXMAP_TRACKS ?
			 exmap_harvest_bits(harvest->flags) : 0;
	long error = exmap_may_command(exmap);
	u64 index, present = 0, cleared = 0;
	unsigned int bit, zeros = 0;

	if (error)
		return error;
	if (harvest->flags & ~EXMAP_HARVEST_FLAGS || harvest->page > exmap->tree.pages ||
	    harvest->count > exmap->tree.pages - harvest->page)
		return -EINVAL;
	for (index = 0; !error && index * EXMAP_HARVEST_WORD < harvest->count; index++) {
		u64 left = min_t(u64, harvest->count - index * EXMAP_HARVEST_WORD,
				 EXMAP_HARVEST_WORD);
		struct exmap_harvest_words words = {};

		down_read(&exmap->walking);
		for (bit = 0; bit < left; bit++)
			exmap_harvest_page(exmap, harvest->page + index * EXMAP_HARVEST_WORD + bit,
					   clear, bit, &words);
		up_read(&exmap->walking);
		present += words.present;
		cleared += words.cleared;
		zeros |= words.zeros;
		error = fatal_signal_pending(current) ? -EINTR :
			exmap_harvest_put(harvest, index, &words);
		cond_resched();
	}
	if (unlikely(zeros))
		exmap_flush_all(exmap, current->mm);
	else if (cleared)
		exmap_flush(exmap, current->mm, harvest->page,
			    harvest->page + harvest->count - 1);
	return error ? error : (long)present;
}
