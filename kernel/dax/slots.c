// SPDX-License-Identifier: GPL-2.0
/* Slots of a heap: entries of level 2 in the process' page tables. heap.h describes them. */

#include <linux/libnvdimm.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include "core/pt_flush.h"
#include "core/pt_slot.h"
#include "dax/heap.h"

int dax_heap_keep_mapped(struct dax_heap *heap)
{
	struct vm_area_struct *vma;

	if (mmap_read_lock_killable(heap->mm))
		return -EINTR;
	vma = find_vma(heap->mm, heap->start);
	if (vma && vma->vm_private_data == heap && !READ_ONCE(heap->closed))
		return 0;
	mmap_read_unlock(heap->mm);
	return -ENXIO;
}

/*
 * Makes the table above a region's slots. In a heap that may not be written the entry that leads to
 * it lacks the right to write, which the core tolerates above level 2. A fault may have made the
 * table, and CPUs may have cached the entry.
 */
static int dax_region_prepare(struct dax_heap *heap, unsigned int index)
{
	unsigned long addr = dax_slot_address(heap, index * DAX_REGION_SLOTS);
	pteval_t entry;
	int error = dax_heap_keep_mapped(heap);

	if (error)
		return error;
	error = pt_slot_prepare(heap->mm, addr, PG_LEVEL_4K);
	if (!error && !heap->writes) {
		entry = pt_slot_get(heap->mm, addr, PG_LEVEL_2M);
		pt_slot_set(heap->mm, addr, PG_LEVEL_2M, entry & ~_PAGE_RW);
		pt_flush_tables(heap->mm, addr, addr + DAX_REGION_SIZE);
	}
	mmap_read_unlock(heap->mm);
	return error;
}

static struct dax_region *dax_region_make(struct dax_heap *heap, unsigned int index)
{
	struct dax_region *region = kvzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);
	int error;

	if (!region)
		return ERR_PTR(-ENOMEM);
	spin_lock_init(&region->lock);
	error = dax_region_prepare(heap, index);
	if (error) {
		kvfree(region);
		return ERR_PTR(error);
	}
	/* Complete before it is there. */
	smp_store_release(&heap->regions[index], region);
	/* A notifier sees the region, or a thread that puts something in sees the notifier. */
	smp_mb();
	return region;
}

static struct dax_region *dax_region_get(struct dax_heap *heap, unsigned int index)
{
	struct dax_region *region = dax_region_of(heap, index * DAX_REGION_SLOTS);

	if (likely(region))
		return region;
	if (mutex_lock_killable(&heap->growing))
		return ERR_PTR(-EINTR);
	region = heap->regions[index] ?: dax_region_make(heap, index);
	mutex_unlock(&heap->growing);
	return region;
}

static void dax_region_release(struct dax_region *region, unsigned int first, unsigned int count)
{
	while (count--)
		clear_bit_unlock(first + count, region->taken);
}

/* Claims slots in a row without a lock. Returns the first one's number in the region. */
static long dax_region_claim(struct dax_region *region, unsigned int count)
{
	unsigned long first = 0;
	unsigned int claimed;

	for (;;) {
		first = bitmap_find_next_zero_area(region->taken, DAX_REGION_SLOTS, first, count,
						   0);
		if (first >= DAX_REGION_SLOTS)
			return -ENOSPC;
		claimed = 0;
		while (claimed < count && !test_and_set_bit_lock(first + claimed, region->taken))
			claimed++;
		if (claimed == count)
			return first;
		/* Another thread was faster. */
		dax_region_release(region, first, claimed);
		first += claimed + 1;
	}
}

static bool dax_slots_have_tables(const struct dax_region *region, unsigned int first,
				  unsigned int count)
{
	while (count--)
		if (!region->slots[first + count].own)
			return false;
	return true;
}

/* Gives slots that are used for the first time their own tables. */
static int dax_slots_prepare(struct dax_heap *heap, struct dax_region *region, unsigned int slot,
			     unsigned int count)
{
	unsigned int first = slot % DAX_REGION_SLOTS, i;
	unsigned long addr;
	int error;

	if (likely(dax_slots_have_tables(region, first, count)))
		return 0;
	error = dax_heap_keep_mapped(heap);
	if (error)
		return error;
	for (i = 0; !error && i < count; i++) {
		addr = dax_slot_address(heap, slot + i);
		if (pt_slot_own_table(heap->mm, addr))
			region->slots[first + i].own = pt_slot_get(heap->mm, addr, PG_LEVEL_4K);
		else
			error = -ENOMEM;
	}
	mmap_read_unlock(heap->mm);
	return error;
}

/* Each CPU begins with a region of its own. */
long dax_slots_claim(struct dax_heap *heap, unsigned int count)
{
	unsigned int begin = raw_smp_processor_id(), i, index;
	unsigned int regions = dax_heap_regions(heap);
	struct dax_region *region;
	long slot = -ENOSPC;
	int error;

	if (!regions)
		return -ENXIO;
	for (i = 0; slot == -ENOSPC && i < regions; i++) {
		index = (begin + i) % regions;
		region = dax_region_get(heap, index);
		if (IS_ERR(region))
			return PTR_ERR(region);
		slot = dax_region_claim(region, count);
	}
	if (slot < 0)
		return slot;
	slot += index * DAX_REGION_SLOTS;
	error = dax_slots_prepare(heap, region, slot, count);
	if (error)
		dax_slots_release(heap, slot, count);
	return error ?: slot;
}

void dax_slots_release(struct dax_heap *heap, unsigned int slot, unsigned int count)
{
	dax_region_release(dax_region_of(heap, slot), slot % DAX_REGION_SLOTS, count);
}

/*
 * Whether slots may be filled: the VMA is there, and the core does not walk the range. The region's
 * lock is held.
 */
static bool dax_heap_admits(const struct dax_heap *heap)
{
	return !READ_ONCE(heap->closed) && !atomic_read(&heap->invalidating);
}

bool dax_slot_put_in(struct dax_heap *heap, unsigned int slot, pteval_t *table)
{
	struct dax_region *region = dax_region_of(heap, slot);
	unsigned int i = slot % DAX_REGION_SLOTS;

	lockdep_assert_held(&region->lock);
	if (!dax_heap_admits(heap) || test_bit(i, region->served))
		return false;
	if (!__test_and_set_bit(i, region->attached))
		pt_slot_set(heap->mm, dax_slot_address(heap, slot), PG_LEVEL_4K,
			    pt_table_entry(table));
	return true;
}

/*
 * Empties the slot's own table. A CPU that has cached a dirty leaf sets no bit, so what was stored
 * is written back after the flush.
 */
static bool dax_slot_empty(struct dax_heap *heap, struct dax_region *region, unsigned int slot)
{
	unsigned long addr = dax_slot_address(heap, slot);
	pteval_t *own = pt_entry_table(region->slots[slot % DAX_REGION_SLOTS].own);
	spinlock_t *lock = pt_table_lock(own);
	unsigned int i, stored = 0;
	pteval_t old;

	spin_lock(lock);
	for (i = 0; i < PT_ENTRIES; i++) {
		old = READ_ONCE(own[i]) ? xchg(own + i, 0) : 0;
		if (old & _PAGE_DIRTY)
			region->frames[stored++] = pt_leaf_pfn(old);
	}
	spin_unlock(lock);
	pt_flush_range(heap->mm, addr, addr + DAX_SLOT_SIZE);
	for (i = 0; i < stored; i++)
		arch_wb_cache_pmem(__va(region->frames[i] << PAGE_SHIFT), PAGE_SIZE);
	return stored;
}

bool dax_slot_take_out(struct dax_heap *heap, unsigned int slot)
{
	struct dax_region *region = dax_region_of(heap, slot);
	unsigned int i = slot % DAX_REGION_SLOTS;

	lockdep_assert_held(&region->lock);
	if (__test_and_clear_bit(i, region->attached))
		pt_slot_set(heap->mm, dax_slot_address(heap, slot), PG_LEVEL_4K,
			    region->slots[i].own);
	return __test_and_clear_bit(i, region->served) && dax_slot_empty(heap, region, slot);
}

bool dax_slot_is_served(struct dax_heap *heap, unsigned int slot)
{
	return test_bit(slot % DAX_REGION_SLOTS, dax_region_of(heap, slot)->served);
}

bool dax_slot_serve(struct dax_heap *heap, unsigned int slot)
{
	struct dax_region *region = dax_region_of(heap, slot);
	unsigned long addr = dax_slot_address(heap, slot);
	unsigned int i = slot % DAX_REGION_SLOTS;

	lockdep_assert_held(&region->lock);
	if (!dax_heap_admits(heap))
		return false;
	if (test_bit(i, region->attached)) {
		dax_slot_take_out(heap, slot);
		pt_flush_tables(heap->mm, addr, addr + DAX_SLOT_SIZE);
	}
	__set_bit(i, region->served);
	return true;
}

void dax_slot_put_leaf(struct dax_heap *heap, unsigned int slot, unsigned int page,
		       pteval_t leaf)
{
	struct dax_region *region = dax_region_of(heap, slot);
	unsigned long addr = dax_slot_address(heap, slot) + page * PAGE_SIZE;
	pteval_t *own = pt_entry_table(region->slots[slot % DAX_REGION_SLOTS].own);
	spinlock_t *lock = pt_table_lock(own);
	pteval_t old;

	lockdep_assert_held(&region->lock);
	if (!dax_heap_admits(heap) || !dax_slot_is_served(heap, slot))
		return;
	spin_lock(lock);
	old = READ_ONCE(own[page]);
	/* What CPUs have noted of the same page stays. */
	if (pt_leaf_pfn(old) == pt_leaf_pfn(leaf))
		leaf |= old & (_PAGE_RW | _PAGE_DIRTY | _PAGE_ACCESSED);
	old = xchg(own + page, leaf);
	spin_unlock(lock);
	if (old)
		pt_flush_range(heap->mm, addr, addr + PAGE_SIZE);
}

static void dax_region_take_out(struct dax_heap *heap, struct dax_region *region,
				unsigned int first, unsigned int count)
{
	unsigned long addr = dax_slot_address(heap, first);
	unsigned int i;

	for (i = 0; i < count; i++) {
		struct dax_slot *slot = region->slots + (first + i) % DAX_REGION_SLOTS;

		if (dax_slot_take_out(heap, first + i) && slot->attachment)
			WRITE_ONCE(slot->attachment->table->is_stored, true);
	}
	pt_flush_tables(heap->mm, addr, addr + count * DAX_SLOT_SIZE);
}

void dax_slots_take_out(struct dax_heap *heap, unsigned long start, unsigned long end)
{
	unsigned int first = (max(start, heap->start) - heap->start) / DAX_SLOT_SIZE;
	unsigned int last = DIV_ROUND_UP(min(end, heap->end) - heap->start, DAX_SLOT_SIZE);
	struct dax_region *region;
	unsigned int slot, next;

	for (slot = first; slot < last; slot = next) {
		next = min(last, round_down(slot, DAX_REGION_SLOTS) + DAX_REGION_SLOTS);
		region = dax_region_of(heap, slot);
		if (!region)
			continue;
		spin_lock(&region->lock);
		dax_region_take_out(heap, region, slot, next - slot);
		spin_unlock(&region->lock);
	}
}

u64 dax_slots_wrong(struct dax_heap *heap, unsigned int slot, unsigned int count)
{
	/* Bits that CPUs set, and a bit that the core sets for user space of its own accord. */
	const pteval_t others = _PAGE_ACCESSED | _PAGE_DIRTY | _PAGE_NX;
	struct dax_region *region = dax_region_of(heap, slot);
	unsigned int i = slot % DAX_REGION_SLOTS;
	u64 wrong = 0;
	pteval_t entry;

	lockdep_assert_held(&region->lock);
	/* Without the VMA there may be no tables. */
	if (READ_ONCE(heap->closed))
		return 0;
	for (; count--; i++, slot++) {
		entry = pt_slot_get(heap->mm, dax_slot_address(heap, slot), PG_LEVEL_4K);
		wrong += test_bit(i, region->attached) ==
			 !((entry ^ region->slots[i].own) & ~others);
	}
	return wrong;
}

void dax_slots_free(struct dax_heap *heap)
{
	unsigned int i;

	for (i = 0; i < heap->region_count; i++)
		kvfree(heap->regions[i]);
}
