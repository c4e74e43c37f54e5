// SPDX-License-Identifier: GPL-2.0
/* How a Morsel gets its shape, its seals, and its end. */

#include <linux/mm.h>
#include <linux/sched/signal.h>

#include "morsel/morsel.h"

/* How often a seal looks whether pages are still pinned. */
#define MORSEL_SEAL_TRIES	5

/* Sets up a new inode. */
void morsel_start(struct morsel *morsel)
{
	mutex_init(&morsel->state);
	mutex_init(&morsel->tables);
	morsel->is_shaped = false;
	morsel->length = 0;
	morsel->flags = 0;
	morsel->address = 0;
	morsel->seals = 0;
	morsel->is_revoked = false;
	morsel->user = NULL;
	morsel->device = NULL;
	morsel->slot = NULL;
	morsel->writers = 0;
	memset(&morsel->tree, 0, sizeof(morsel->tree));
	morsel->reader = NULL;
	pt_mounts_init(&morsel->mounts);
	atomic64_set(&morsel->pages, 0);
	xa_init_flags(&morsel->blocks, XA_FLAGS_ACCOUNT);
}

unsigned int morsel_max_order(bool is_on_device)
{
	/*
	 * A device has a guard for tables of level 2 only, and no device is so large that it needs
	 * more.
	 */
	return !is_on_device && pgtable_l5_enabled() ? 4 : 3;
}

bool morsel_shape_is_right(const struct vellum_morsel_create *create, bool is_on_device)
{
	u64 extent;

	if (create->order > morsel_max_order(is_on_device) || create->flags & ~(u64)MORSEL_FLAGS)
		return false;
	/* Recovery could not find pinned pages again, and no single store can split 2 MiB. */
	if (is_on_device && (create->flags & (VELLUM_MORSEL_PINNABLE | VELLUM_MORSEL_HUGE)))
		return false;
	extent = VELLUM_MORSEL_EXTENT(create->order);
	if (!create->length || create->length > extent)
		return false;
	if ((create->flags & VELLUM_MORSEL_HUGE) &&
	    (create->order < 2 || (create->flags & VELLUM_MORSEL_PINNABLE)))
		return false;
	return IS_ALIGNED(create->address, extent) && create->address <= TASK_SIZE_MAX - extent;
}

static int morsel_shape_locked(struct morsel *morsel, const struct vellum_morsel_create *create)
{
	int error;

	if (morsel->is_revoked)
		return -EIO;
	if (morsel->is_shaped)
		return -EBUSY;
	if (!morsel_charge(morsel, 1))
		return -ENOSPC;
	/* The page of order 0 has a table, too, which no process mounts. */
	error = pt_tree_init_sparse(&morsel->tree, create->order ?: 1,
				    morsel->device ? &morsel->device->source : NULL);
	if (error) {
		morsel_uncharge(morsel, 1);
		return error;
	}
	morsel->order = create->order;
	morsel->length = create->length;
	morsel->flags = create->flags;
	morsel->address = create->address;
	morsel->leaf_flags = PT_LEAF_FLAGS;
	if (!(create->flags & VELLUM_MORSEL_PINNABLE))
		morsel->leaf_flags |= _PAGE_SPECIAL;
	if (morsel->slot) {
		morsel_persist(morsel->tree.root, PAGE_SIZE);
		morsel_slot_set_shape(morsel->device, morsel->slot, morsel);
	}
	i_size_write(&morsel->inode, create->length);
	/*
	 * Pairs with the acquire in morsel_is_shaped(). Other threads use the Morsel from here on.
	 */
	smp_store_release(&morsel->is_shaped, true);
	return 0;
}

static void morsel_count_page(void *count, u64 page, pteval_t leaf)
{
	atomic64_inc(count);
}

/* Sets up a Morsel that the device has. */
void morsel_adopt(struct morsel *morsel, struct morsel_slot *slot)
{
	struct morsel_device *device = morsel->device;

	morsel->slot = slot;
	morsel->seals = slot->seals;
	if (!slot->root)
		return;
	morsel->order = slot->order;
	morsel->length = slot->length;
	morsel->flags = slot->flags;
	morsel->address = slot->address;
	morsel->leaf_flags = PT_LEAF_FLAGS | _PAGE_SPECIAL;
	pt_tree_adopt(&morsel->tree, slot->order ?: 1, &device->source,
		      morsel_device_page(device, slot->root));
	pt_tree_each_leaf(&morsel->tree, morsel_count_page, &morsel->pages);
	i_size_write(&morsel->inode, slot->length);
	morsel->is_shaped = true;
}

/* Removes the Morsel's name, and with it all that a restart would find. */
void morsel_lose_name(struct morsel *morsel)
{
	mutex_lock(&morsel->state);
	if (morsel->slot)
		morsel_slot_erase(morsel->device, morsel->slot);
	morsel->slot = NULL;
	mutex_unlock(&morsel->state);
}

int morsel_shape(struct morsel *morsel, const struct vellum_morsel_create *create)
{
	int error;

	if (!morsel_shape_is_right(create, morsel->device))
		return -EINVAL;
	if (mutex_lock_killable(&morsel->state))
		return -EINTR;
	error = morsel_shape_locked(morsel, create);
	mutex_unlock(&morsel->state);
	return error;
}

int morsel_shape_by_length(struct morsel *morsel, u64 length)
{
	struct vellum_morsel_create create = { .length = length };

	while (create.order < morsel_max_order(morsel->device) &&
	       length > VELLUM_MORSEL_EXTENT(create.order))
		create.order++;
	return morsel_shape(morsel, &create);
}

static void morsel_set_seals(struct morsel *morsel, u64 seals)
{
	if (morsel->slot)
		morsel_slot_set_seals(morsel->slot, seals);
	WRITE_ONCE(morsel->seals, seals);
}

static void morsel_count_pinned(void *count, u64 page, pteval_t leaf)
{
	struct page *there = pfn_to_page(pt_leaf_pfn(leaf));
	/*
	 * The Morsel's reference, and one for each entry that maps the page of order 0. _mapcount
	 * begins at -1.
	 */
	int expected = 2 + atomic_read(&there->_mapcount);

	*(u64 *)count += page_ref_count(there) != expected;
}

/*
 * Whether something has references to pages. A device, or I/O that has not ended, may write there
 * long after the mapping that allowed it is gone. KVM takes references whether pages are pinnable
 * or not, and keeps them after all notifiers. No mapping can write, and the mutex `state` is held,
 * so no page goes meanwhile.
 */
static bool morsel_is_pinned(struct morsel *morsel)
{
	u64 count = 0;

	/*
	 * The core pins pages without locks, with interrupts off. A virtual CPU that its host does
	 * not run may be in the middle of that: it is flushed later, without an interrupt that
	 * would wait for it. After this it has the reference, or sees that the mapping is gone.
	 */
	synchronize_rcu();
	pt_tree_each_leaf(&morsel->tree, morsel_count_pinned, &count);
	return count;
}

/*
 * Waits for threads that looked whether a page may come before a seal or the revocation forbade it.
 * After this no page comes: see morsel_put_leaf().
 */
static void morsel_end_population(void)
{
	synchronize_rcu();
}

/* EAGAIN: pages are pinned, if only by a reader at this moment. */
static int morsel_seal_locked(struct morsel *morsel, u64 seals)
{
	if (morsel->is_revoked)
		return -EIO;
	if (seals & ~morsel->seals & VELLUM_MORSEL_SEAL_CONTENT) {
		if (morsel->writers)
			return -EBUSY;
		if (morsel_is_pinned(morsel))
			return -EAGAIN;
	}
	morsel_set_seals(morsel, morsel->seals | seals);
	if (seals & VELLUM_MORSEL_SEAL_POPULATION)
		morsel_end_population();
	return 0;
}

int morsel_seal(struct morsel *morsel, u64 seals)
{
	unsigned int tries = MORSEL_SEAL_TRIES;
	int error;

	if (seals & ~(u64)(VELLUM_MORSEL_SEAL_CONTENT | VELLUM_MORSEL_SEAL_POPULATION))
		return -EINVAL;
	do {
		if (mutex_lock_killable(&morsel->state))
			return -EINTR;
		error = morsel_seal_locked(morsel, seals);
		mutex_unlock(&morsel->state);
	} while (error == -EAGAIN && --tries && !schedule_timeout_killable(HZ / 50));
	return error == -EAGAIN ? -EBUSY : error;
}

int morsel_begin_writing(struct morsel *morsel)
{
	int error = 0;

	if (mutex_lock_killable(&morsel->state))
		return -EINTR;
	if (morsel->is_revoked)
		error = -EIO;
	else if (morsel->seals & VELLUM_MORSEL_SEAL_CONTENT)
		error = -EPERM;
	else
		morsel->writers++;
	mutex_unlock(&morsel->state);
	return error;
}

void morsel_end_writing(struct morsel *morsel)
{
	mutex_lock(&morsel->state);
	morsel->writers--;
	mutex_unlock(&morsel->state);
}

int morsel_revoke(struct morsel *morsel)
{
	mutex_lock(&morsel->state);
	WRITE_ONCE(morsel->is_revoked, true);
	mutex_unlock(&morsel->state);
	morsel_end_population();
	if (!morsel_is_shaped(morsel))
		return 0;
	pt_mounts_detach(&morsel->mounts);
	return morsel_punch_pages(morsel, 0, morsel_page_count(morsel));
}

static void morsel_free_leaf(void *morsel, u64 page, pteval_t leaf)
{
	morsel_free_page(morsel, pfn_to_page(pt_leaf_pfn(leaf)));
}

/* Ends a Morsel without a name, descriptors and mappings. */
void morsel_end(struct morsel *morsel)
{
	u64 taken;

	if (!morsel_is_shaped(morsel))
		return;
	WARN_ON_ONCE(morsel->mounts.count || morsel->writers);
	taken = atomic64_read(&morsel->pages) + atomic_long_read(&morsel->tree.tables);
	morsel_destroy_reader(morsel);
	xa_destroy(&morsel->blocks);
	if (morsel->slot) {
		/* The device keeps the pages and the tables. */
		morsel_device_forget_tables(morsel->device, morsel->slot);
		pt_tree_release(&morsel->tree);
		return;
	}
	pt_tree_each_leaf(&morsel->tree, morsel_free_leaf, morsel);
	pt_tree_destroy(&morsel->tree);
	morsel_uncharge(morsel, taken);
}
