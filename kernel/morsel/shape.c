// SPDX-License-Identifier: GPL-2.0
/* How a Morsel gets its shape, what it is sealed against, and how it ends. */

#include <linux/mm.h>
#include <linux/sched/signal.h>

#include "morsel/morsel.h"

/* So often it is looked whether pages that are pinned are so no longer. */
#define SEAL_TRIES	5

/* A new inode's. */
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
	/* On a device there is a guard for tables of level 2, and so much is on none. */
	return !is_on_device && pgtable_l5_enabled() ? 4 : 3;
}

bool morsel_shape_is_right(const struct vellum_morsel_create *create, bool is_on_device)
{
	u64 extent;

	if (create->order > morsel_max_order(is_on_device) || create->flags & ~(u64)MORSEL_FLAGS)
		return false;
	/* What is pinned could not be found again; 2 MiB cannot be split by one store. */
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

static int shape_locked(struct morsel *morsel, const struct vellum_morsel_create *create)
{
	int error;

	if (morsel->is_revoked)
		return -EIO;
	if (morsel->is_shaped)
		return -EBUSY;
	if (!morsel_charge(morsel, 1))
		return -ENOSPC;
	/* A page on its own has a table, too, but nobody mounts it. */
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
	/* From here on it is used. */
	smp_store_release(&morsel->is_shaped, true);
	return 0;
}

static void count_page(void *count, u64 page, u64 leaf)
{
	atomic64_inc(count);
}

/* What a device has found again. */
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
	pt_tree_each_leaf(&morsel->tree, count_page, &morsel->pages);
	i_size_write(&morsel->inode, slot->length);
	morsel->is_shaped = true;
}

/* Its name goes, and with it what a restart would find. */
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
	error = shape_locked(morsel, create);
	mutex_unlock(&morsel->state);
	return error;
}

int morsel_shape_by_length(struct morsel *morsel, u64 length)
{
	struct vellum_morsel_create create = { .length = length };

	while (create.order < morsel_max_order(morsel->device) && length > VELLUM_MORSEL_EXTENT(create.order))
		create.order++;
	return morsel_shape(morsel, &create);
}

static void set_seals(struct morsel *morsel, u64 seals)
{
	if (morsel->slot)
		morsel_slot_set_seals(morsel->slot, seals);
	WRITE_ONCE(morsel->seals, seals);
}

static void count_pinned(void *count, u64 page, u64 leaf)
{
	struct page *there = pfn_to_page(pt_leaf_pfn(leaf));
	/* The Morsel's, and those of entries that map a page on its own. */
	int expected = 2 + atomic_read(&there->_mapcount);

	*(u64 *)count += page_ref_count(there) != expected;
}

/*
 * Whether something has references to pages: a device, or I/O that has not ended, which may write
 * there long after the mapping is gone by which it was let in. KVM takes them whether pages are
 * pinnable or not, and keeps them after all notifiers. No mapping can write, and the mutex `state`
 * is held, so no page goes meanwhile.
 */
static bool is_pinned(struct morsel *morsel)
{
	u64 count = 0;

	/*
	 * The core pins pages without locks, with interrupts off. A virtual processor that its host
	 * does not run may be in the middle of that: it is flushed later, without an interrupt that
	 * would wait for it. It has the reference, or sees that the mapping is gone, after this.
	 */
	synchronize_rcu();
	pt_tree_each_leaf(&morsel->tree, count_pinned, &count);
	return count;
}

/* EAGAIN: pages are pinned, if only by who reads them at this time. */
static int seal_locked(struct morsel *morsel, u64 seals)
{
	if (morsel->is_revoked)
		return -EIO;
	if (seals & ~morsel->seals & VELLUM_MORSEL_SEAL_CONTENT) {
		if (morsel->writers)
			return -EBUSY;
		if (is_pinned(morsel))
			return -EAGAIN;
	}
	set_seals(morsel, morsel->seals | seals);
	return 0;
}

int morsel_seal(struct morsel *morsel, u64 seals)
{
	unsigned int tries = SEAL_TRIES;
	int error;

	if (seals & ~(u64)(VELLUM_MORSEL_SEAL_CONTENT | VELLUM_MORSEL_SEAL_POPULATION))
		return -EINVAL;
	do {
		if (mutex_lock_killable(&morsel->state))
			return -EINTR;
		error = seal_locked(morsel, seals);
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
	/* Pairs with the one after a page was put: it goes here, or who has put it takes it off. */
	smp_mb();
	if (!morsel_is_shaped(morsel))
		return 0;
	pt_mounts_detach(&morsel->mounts);
	return morsel_punch_pages(morsel, 0, morsel_page_count(morsel));
}

static void free_page_of(void *morsel, u64 page, u64 leaf)
{
	morsel_free_page(morsel, pfn_to_page(pt_leaf_pfn(leaf)));
}

/* Nobody has it: no name, no descriptor, no mapping. */
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
		/* It stays where it is. */
		morsel_device_forget_tables(morsel->device, morsel->slot);
		pt_tree_release(&morsel->tree);
		return;
	}
	pt_tree_each_leaf(&morsel->tree, free_page_of, morsel);
	pt_tree_destroy(&morsel->tree);
	morsel_uncharge(morsel, taken);
}
